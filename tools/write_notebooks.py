#!/usr/bin/env python
"""Write the lessons of docs/*/course as notebooks, into docs/notebooks.

    python tools/write_notebooks.py            # after a change of a lesson
    python tools/write_notebooks.py --check    # print what is out of date, and end with 1 if anything is

A cell for each block of Python, and one for the text between two blocks. tests/test_notebooks.py runs the
check, and the cells.
"""

import json
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("docs") / "notebooks"
_BLOCK = re.compile(r"^```python\n(.*?)^```$\n?", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def notebook(page: str, language: str) -> dict[str, Any]:
    """The notebook of a lesson, in Jupyter's format 4.5."""
    cells = [
        {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": _lines(text)}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, text) in enumerate(_parts(page, language), start=1)
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _parts(page: str, language: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each cell."""
    for number, text in enumerate(_BLOCK.split(page)):
        if number % 2:
            yield "code", text.strip("\n")
        elif text.strip():
            # Seen from docs/notebooks/LANGUAGE, where other lessons are notebooks, too.
            linked = _LINK.sub(lambda match: f"]({_moved(match[1], language)}", text.strip("\n"))
            yield "markdown", linked


def _moved(target: str, language: str) -> str:
    if "/" not in target and target.endswith(".md"):
        return target.removesuffix(".md") + ".ipynb"
    return posixpath.normpath(f"../../{language}/course/{target}")


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def written() -> dict[Path, str]:
    """The text of each notebook, by its path in the project."""
    found = {}
    for language in ("en", "zh"):
        for page in sorted((ROOT / "docs" / language / "course").glob("*.md")):
            made = notebook(page.read_text(encoding="utf-8"), language)
            text = json.dumps(made, ensure_ascii=False, indent=1) + "\n"
            found[FOLDER / language / f"{page.stem}.ipynb"] = text
    return found


def main(words: list[str]) -> int:
    expected = written()
    there = {path.relative_to(ROOT) for path in (ROOT / FOLDER).rglob("*.ipynb")}
    stale = sorted(there - expected.keys())
    for path, text in expected.items():
        if path not in there or (ROOT / path).read_text(encoding="utf-8") != text:
            stale.append(path)
    for path in stale:
        print(f"{path}: {'is out of date' if '--check' in words else 'written'}")
        if "--check" in words:
            continue
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        if path in expected:
            (ROOT / path).write_text(expected[path], encoding="utf-8")
        else:
            (ROOT / path).unlink()
    return 1 if stale and "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
