"""`flambeau recipes`: list the recipes, show one, or copy one into your project."""

import argparse
import ast
import difflib
from itertools import groupby
from pathlib import Path

HELP = "list the recipes, show one, or copy one into your project"

_FOLDER = Path(__file__).resolve().parents[1] / "recipes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three actions; none of them means `list`."""
    chinese = "describe the recipes in Chinese"
    parser.add_argument("--zh", action="store_true", help=chinese)
    actions = parser.add_subparsers(dest="action", title="actions")
    listing = actions.add_parser("list", help="name every recipe in one line (the default)")
    # SUPPRESS: a default of the action's own would overwrite `recipes --zh list`.
    listing.add_argument("--zh", action="store_true", default=argparse.SUPPRESS, help=chinese)
    name = "name of the recipe, such as ema or training/ema"
    show = actions.add_parser("show", help="print the source of a recipe")
    show.add_argument("name", metavar="NAME", help=name)
    copy = actions.add_parser("copy", help="copy the file of a recipe; it needs only torch")
    copy.add_argument("name", metavar="NAME", help=name)
    copy.add_argument("dest", metavar="DEST", type=Path, help="a folder, or a new file NAME.py")


def run(arguments: argparse.Namespace) -> int:
    """Do what `flambeau recipes` was asked; the exit code."""
    if arguments.action == "copy":
        text = f"wrote {_copy(_find(arguments.name), arguments.dest)}\n"
    elif arguments.action == "show":
        text = _find(arguments.name).read_text(encoding="utf-8")
    else:
        text = _listing(chinese=arguments.zh)
    print(text, end="", flush=True)  # flushed here, where `| head` is handled by the command
    return 0


def _recipes() -> list[Path]:
    return sorted(path for path in _FOLDER.rglob("*.py") if path.name != "__init__.py")


def _listing(*, chinese: bool) -> str:
    paths = _recipes()
    width = max(len(path.stem) for path in paths)
    lines = []
    for folder, group in groupby(paths, key=lambda path: path.parent):
        lines.append(folder.relative_to(_FOLDER).as_posix())
        for path in group:
            lines.append(f"  {path.stem:{width}}  {_summary(path, chinese=chinese)}")
    return "\n".join(lines) + "\n"


def _summary(path: Path, *, chinese: bool) -> str:
    """The first paragraph of the docstring, or the second, which is the same in Chinese.

    The file is parsed, not imported: importing it would import torch.
    """
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path} has no docstring; tests/test_architecture.py should have said so"
    return docstring.split("\n\n")[1 if chinese else 0]


def _find(name: str) -> Path:
    from flambeau.errors import InputError

    paths = {path.stem: path for path in _recipes()}
    paths |= {path.relative_to(_FOLDER).with_suffix("").as_posix(): path for path in _recipes()}
    if name not in paths:
        near = difflib.get_close_matches(name, paths, n=3, cutoff=0.5)
        question = f"; did you mean {' or '.join(near)}?" if near else "."
        raise InputError(f"no recipe is named {name!r}{question}\n`flambeau recipes` lists them.")
    return paths[name]


def _copy(recipe: Path, dest: Path) -> Path:
    from flambeau.errors import InputError

    if dest.is_dir():
        dest = dest / recipe.name
    elif dest.suffix != ".py":
        raise InputError(
            f"{dest} is neither a folder nor the name of a .py file.\n"
            f"Make the folder first, or name the file: {dest}.py"
        )
    try:
        with dest.open("xb") as file:
            file.write(recipe.read_bytes())
    except FileExistsError as error:
        raise InputError(
            f"{dest} exists, and nothing was written.\nRemove it, or name another file."
        ) from error
    except OSError as error:
        raise InputError(f"cannot write {dest}: {error.strerror}") from error
    return dest
