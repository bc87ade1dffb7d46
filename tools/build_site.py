#!/usr/bin/env python
"""Make the pages of docs/ into one site in two languages, which works from a folder without a network.

    pip install -e '.[docs]'
    python tools/build_site.py                 # into build/site; open build/site/index.html
    python tools/build_site.py --out FOLDER

The navigation is made of the sections and links of docs/LANGUAGE/index.md, and so is llms.txt, the list for
programs that read; llms-full.txt has all pages of a language in one file.
Each warning is an error: a link that leads nowhere, a page that only one language has, a page that the
index does not name.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from flambeau.cli.recipe_search import Entry, Index, rules_of_search

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "tools" / "site"
LANGUAGES = {"en": "en", "zh": "zh_CN"}  # our folder, Sphinx' name
CONTRIBUTING = {"en": "CONTRIBUTING.md", "zh": "CONTRIBUTING.zh-CN.md"}
RECIPES = {"en": "Recipes", "zh": "配方"}
START = """<!DOCTYPE html>
<meta charset="utf-8">
<title>flambeau</title>
<script>location.replace((/^zh/.test(navigator.language) ? "zh" : "en") + "/index.html")</script>
<a href="en/index.html">English</a> <a href="zh/index.html" lang="zh">中文</a>
"""


def main() -> int:
    """Build; the exit status is 1 where a page is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "site", help="folder of the site"
    )
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="folder of the pages")
    args = parser.parse_args()
    if missing := [name for name in ("sphinx", "myst_parser", "furo") if find_spec(name) is None]:
        print(f"no {', '.join(missing)}: pip install -e '.[docs]'", file=sys.stderr)
        return 1
    for language in LANGUAGES:
        if not (args.docs / language / "index.md").is_file():
            parser.error(
                f"there is no {args.docs / language / 'index.md'}: --docs is the folder of en/ and zh/"
            )
    if not is_free(args.out):
        parser.error(
            f"{args.out} holds something else: --out takes a new folder, or that of a former site"
        )
    if found := list(lonely_pages(args.docs)):
        print("\n".join(found), file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder).resolve()
        collect(args.docs, stage)
        site = stage / "site"
        builds = [start_build(stage, site / language, language) for language in LANGUAGES]
        for build in builds:
            said = build.communicate()[0].replace(f"{stage}/", "")
            print(said, end="", file=sys.stderr)
        if any(build.returncode for build in builds):
            return 1
        for language in LANGUAGES:
            for name, text in for_programs(args.docs / language).items():
                (site / language / name).write_text(text, "utf-8")
            text = search_index(args.docs, language, site / language)
            static = site / language / "_static"
            (static / "search_index.js").write_text(text, "utf-8")
            for unused in ("searchtools.js", "language_data.js"):  # of the search of Sphinx
                (static / unused).unlink(missing_ok=True)
        (site / "index.html").write_text(START, "utf-8")
        if args.out.exists():
            shutil.rmtree(args.out)
        shutil.move(site, args.out)
    print(f"open {args.out / 'index.html'}")
    return 0


def for_programs(pages: Path) -> dict[str, str]:
    """llms.txt, a list of the pages as https://llmstxt.org says, and llms-full.txt, which has all of them."""
    index = (pages / "index.md").read_text(encoding="utf-8")
    title, summary, _ = index.split("\n\n", 2)
    listed = [
        f"\n{line}\n" if line.startswith("## ") else line
        for line in index.splitlines()
        if line.startswith(("## ", "- [")) and "(../../" not in line
    ]
    optional = "\n## Optional\n\n- [llms-full.txt](llms-full.txt)\n"
    text = "\n".join([title, "", f"> {summary}", *listed, optional])
    first = [pages / name for name in re.findall(r"^- \[.*?\]\((.*?\.md)\)", index, re.M)]
    every = [*first, *(path for path in sorted(pages.rglob("*.md")) if path not in first)]
    bodies = [path.read_text(encoding="utf-8").strip() for path in every if path.exists()]
    return {
        "llms.txt": re.sub(r"\(([\w/]+)\.md([)#])", r"(\1.html\2", text),
        "llms-full.txt": "\n\n".join(bodies) + "\n",
    }


def search_index(docs: Path, language: str, site: Path) -> str:
    """A script with all that `flambeau how` searches, and the page of the site for each entry."""
    index = Index(chinese=language == "zh", docs=docs)
    entries = [
        {
            "kind": entry.kind,
            "name": entry.name,
            "line": entry.line,
            "url": url,
            "texts": entry.texts,
            "messages": entry.messages,
        }
        for entry in index.entries
        if (site / (url := url_of(entry)).partition("#")[0]).exists()
    ]
    facts = json.dumps({"entries": entries, **rules_of_search()}, ensure_ascii=False)
    return f"(window.flambeauIndex ??= {{}}).{language} = {facts};\n"


def url_of(entry: Entry) -> str:
    """The page of an entry, from the folder of its language; flags and lint rules have one page."""
    if entry.kind == "recipe":
        return f"recipes/{PurePosixPath(entry.name).name}.html"
    if entry.kind == "page":
        page, _, mark = entry.name.partition("#")
        return page.removesuffix(".md") + ".html" + (f"#{mark}" if mark else "")
    return {"flag": "train.html", "rule": "lint.html"}[entry.kind]


def is_free(out: Path) -> bool:
    """Whether nothing but a site of this script would be lost."""
    if not out.exists():
        return True
    start = out / "index.html"
    return out.is_dir() and (
        not any(out.iterdir()) or (start.is_file() and start.read_text("utf-8") == START)
    )


def lonely_pages(docs: Path) -> Iterator[str]:
    """Pages that one language has and the other lacks."""
    pages = {
        name: {p.relative_to(docs / name) for p in (docs / name).rglob("*.md")}
        for name in LANGUAGES
    }
    for name, other in (("en", "zh"), ("zh", "en")):
        for page in sorted(pages[name] - pages[other]):
            yield f"docs/{name}/{page} has no docs/{other}/{page}"


def collect(docs: Path, stage: Path) -> None:
    """Copy the pages to where the list of recipes and CONTRIBUTING.md can stand among them.

    What else the pages link to stays where it is, behind links to the folders of the project.
    """
    shutil.copytree(docs, stage / "docs")
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("docs", "build"):
            (stage / path.name).symlink_to(path)
    for language, source in CONTRIBUTING.items():
        pages = stage / "docs" / language
        text = (ROOT / source).read_text(encoding="utf-8").replace(f"docs/{language}/", "")
        for other, name in CONTRIBUTING.items():
            text = text.replace(f"({name})", f"(../{other}/contributing.md)")
        (pages / "contributing.md").write_text(text, "utf-8")
        (pages / "recipes").mkdir(exist_ok=True)
        listed = "".join(recipe_list(pages / "recipes"))
        (pages / "recipes" / "index.md").write_text(f"# {RECIPES[language]}\n{listed}", "utf-8")
        index = pages / "index.md"
        text = index.read_text(encoding="utf-8").replace(f"(../../{source})", "(contributing.md)")
        index.write_text(text + "".join(navigation(text)), encoding="utf-8")


def recipe_list(pages: Path) -> Iterator[str]:
    """The pages of the recipes, by the folder of each recipe, as `flambeau recipes` lists them."""
    for folder in sorted((ROOT / "src" / "flambeau" / "recipes").glob("[!_]*/")):
        names = [
            path.stem
            for path in sorted(folder.glob("*.py"))
            if (pages / f"{path.stem}.md").exists()
        ]
        if names:
            yield "\n".join(
                ["", f"## {folder.name}", "", "```{toctree}", ":maxdepth: 1", *names, "```", ""]
            )


def navigation(index: str) -> Iterator[str]:
    """A hidden table of contents for each section of the index, with the pages that it links to."""
    for section in re.split(r"^## ", index, flags=re.MULTILINE)[1:]:
        caption, _, text = section.partition("\n")
        targets = re.findall(r"\]\(((?!\.\./)[\w/]+(?:\.md|/))\)", text)
        entries = [re.sub(r"/$", "/index.md", target) for target in targets]
        yield "\n".join(["\n\n```{toctree}", ":hidden:", f":caption: {caption}", *entries, "```"])


def start_build(stage: Path, out: Path, language: str) -> subprocess.Popen[str]:
    """Sphinx on one language, in a process of its own; its warnings are what it writes."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    settings = ["-c", str(SITE), "-D", f"language={LANGUAGES[language]}"]
    state = ["-d", str(stage / f"state-{language}")]
    pages = str(stage / "docs" / language)
    return subprocess.Popen(
        [*command, *settings, *state, pages, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )


if __name__ == "__main__":
    sys.exit(main())
