"""`flambeau recipes`: list the recipes, search them and the pages, show one, or copy some."""

import argparse
import ast
import difflib
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from flambeau.cli.reading_flags import check_at_least
from flambeau.cli.recipe_search import (
    RECIPES,
    Index,
    docs_folder,
    docstring,
    is_chinese,
    recipe_files,
    recipe_name,
    section,
)
from flambeau.cli.table import print_json, print_table
from flambeau.errors import InputError, NothingFound, nearest
from flambeau.terminal import print_text, say

HELP = "list the recipes, search them and the pages, show one, or copy some into your project"

_NAMED = 4  # names in the printed import line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    chinese = "in Chinese"
    parser.add_argument("--zh", action="store_true", help=chinese)
    actions = parser.add_subparsers(dest="action", title="actions")
    listing = actions.add_parser("list", help="name every recipe in one line (the default)")
    find = actions.add_parser("find", help="search recipes, pages and flags of train, best first")
    find.add_argument(
        "query",
        metavar="WORD",
        nargs="+",
        help="such as moving average, torch.cuda.amp, 'CUDA out of memory'; or in Chinese",
    )
    find.add_argument("--top", type=int, default=10, metavar="N", help="rows (default: 10)")
    for action in (listing, find):
        action.add_argument(
            "--json", action="store_true", help="a JSON object per line, for programs"
        )
    name = "name of the recipe, such as ema or training/ema"
    show = actions.add_parser("show", help="print the source of a recipe")
    show.add_argument("name", metavar="NAME", help=name)
    page = actions.add_parser("page", help="print the page of a recipe, or another page")
    page.add_argument(
        "name",
        metavar="NAME",
        help="of a recipe, or as `find` prints it, such as memory.md#del-loss",
    )
    copy = actions.add_parser("copy", help="copy the files of recipes; each needs only torch")
    copy.add_argument("names", metavar="NAME", nargs="+", help=name)
    copy.add_argument(
        "dest", metavar="DEST", type=Path, help="a folder; for one, or a new file NAME.py"
    )
    for action in (listing, find, page):
        # SUPPRESS: a default of the action's own would overwrite `recipes --zh list`.
        action.add_argument("--zh", action="store_true", default=argparse.SUPPRESS, help=chinese)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "find":
        return _search(arguments)
    if arguments.action == "copy":
        text = _copy(list(dict.fromkeys(map(_find, arguments.names))), arguments.dest)
    elif arguments.action == "show":
        text = _find(arguments.name).read_text(encoding="utf-8")
    elif arguments.action == "page":
        text = _page(arguments.name, language="zh" if arguments.zh else "en")
    elif getattr(arguments, "json", False):
        print_json(
            {"folder": folder, "name": path.stem, "line": line}
            for folder, path, line in _recipes(chinese=arguments.zh)
        )
        return 0
    else:
        text = _listing(chinese=arguments.zh)
    print_text(text, end="")  # flushed here, where `| head` is handled by the command
    return 0


def _search(arguments: argparse.Namespace) -> int:
    check_at_least(arguments, top=1)
    words = " ".join(arguments.query)
    results = Index(chinese=arguments.zh or is_chinese(words)).search(words, top=arguments.top)
    if not results:
        hint = nearest(words, [path.stem for path in recipe_files()])
        raise NothingFound(f"nothing found for {words!r}{hint}")
    if arguments.json:
        print_json({"kind": e.kind, "name": e.name, "line": e.line} for e in results)
    else:
        print_table(("what", "name", "line"), ((e.kind, e.name, e.line) for e in results))
        say("next: flambeau recipes page NAME, or flambeau recipes show NAME")
    return 0


def _recipes(*, chinese: bool) -> Iterator[tuple[str, Path, str]]:
    """The folder, file and line of each recipe."""
    for path in recipe_files():
        line = docstring(path).split("\n\n")[1 if chinese else 0]
        yield path.parent.relative_to(RECIPES).as_posix(), path, line


def _listing(*, chinese: bool) -> str:
    recipes = list(_recipes(chinese=chinese))
    width = max(len(path.stem) for _, path, _ in recipes)
    lines = []
    for folder, group in groupby(recipes, key=lambda recipe: recipe[0]):
        lines.append(folder)
        lines += [f"  {path.stem:{width}}  {line}" for _, path, line in group]
    return "\n".join(lines) + "\n"


def _find(name: str) -> Path:
    paths = {path.stem: path for path in recipe_files()}
    paths |= {recipe_name(path): path for path in recipe_files()}
    if name not in paths:
        near = difflib.get_close_matches(name, paths, n=3, cutoff=0.5)
        question = f"; did you mean {' or '.join(near)}?" if near else "."
        raise InputError(
            f"no recipe is named {name!r}{question}\n"
            f"`flambeau recipes` lists them, `flambeau recipes find WORD` searches.{_page_about(name)}"
        )
    return paths[name]


def _page_about(name: str) -> str:
    """A hint at the page about a name, as of a recipe that is now a few lines on a page."""
    words = name.rpartition("/")[2].replace("_", " ")
    pages = [
        entry.name
        for entry in Index(chinese=False).search(words, min_share=0.5)
        if entry.kind == "page"
    ]
    return f" On a page: flambeau recipes page {pages[0]}" if pages else ""


def _page(name: str, *, language: str) -> str:
    folder = docs_folder()
    if folder is None:
        raise InputError(
            "the pages are not installed here; install flambeau again: its wheel has them"
        )
    files = sorted((folder / language).rglob("*.md"))
    pages = {path.relative_to(folder / language).as_posix(): path for path in files}
    short = {page.removesuffix(".md"): path for page, path in pages.items()}
    recipes = {path.stem: pages[f"recipes/{path.stem}.md"] for path in recipe_files()}
    recipes |= {recipe_name(path): recipes[path.stem] for path in recipe_files()}
    # `page schedules` is that of the recipe, `page schedules.md` the other one.
    known = short | pages | recipes
    wanted, _, mark = name.partition("#")
    if wanted not in known:
        raise InputError(
            f"no recipe and no page is named {wanted!r}{nearest(wanted, known)} "
            f"(flambeau recipes find WORD searches).{_page_about(wanted)}"
        )
    # The words after `bash` are only for the tests of the pages.
    text = re.sub(r"^( *```bash) .*", r"\1", known[wanted].read_text(encoding="utf-8"), flags=re.M)
    part = section(text, mark) if mark else text
    if part is None:
        raise InputError(f"{wanted} has no heading #{mark}; leave it out to print the whole page")
    return part


def _copy(recipes: list[Path], dest: Path) -> str:
    """Copy the files, checking all targets first; returns what to do with them."""
    targets = _targets(recipes, dest)
    for target in targets:
        if target.exists() or target.is_symlink():
            raise InputError(
                f"{target} exists, and nothing was written.\nRemove it, or name another place."
            )
    lines = []
    for recipe, target in zip(recipes, targets, strict=True):
        try:
            with target.open("xb") as file:
                file.write(recipe.read_bytes())
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror}") from error
        lines += [f"wrote {target}", f"  {_import_line(recipe, target)}"]
        lines += [f"  page: flambeau recipes page {recipe.stem}"]
    return "\n".join(lines) + "\n"


def _targets(recipes: list[Path], dest: Path) -> list[Path]:
    """The new path of each."""
    if dest.is_dir():
        return [dest / recipe.name for recipe in recipes]
    if len(recipes) > 1:
        raise InputError(f"{dest} is no folder, which several recipes need.\nMake it first.")
    if dest.suffix != ".py":
        raise InputError(
            f"{dest} is neither a folder nor the name of a .py file.\n"
            f"Make the folder first, or name the file: {dest}.py"
        )
    return [dest]


def _import_line(recipe: Path, target: Path) -> str:
    """How a script in the current folder imports the copy."""
    tree = ast.parse(recipe.read_text(encoding="utf-8"))
    names = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name[0] != "_"
    ]
    parts = [target.stem]
    if not target.is_absolute():
        parts = [part for part in target.with_suffix("").parts if part != "."]
    module = ".".join(parts) if all(part.isidentifier() for part in parts) else target.stem
    return f"from {module} import {', '.join(names[:_NAMED])}"
