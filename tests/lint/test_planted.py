"""Mistakes that were planted by somebody who had not seen the rules, and clean scripts that look alike.

The first line of each file of planted/bad says what is wrong and in which line.
planted/found.txt names those that are found; 'preview' behind a name: with --preview alone.
A new rule adds lines there, and none goes without a reason.
"""

import re
from pathlib import Path

import pytest

from flambeau_lint.engine import RuleSet
from linted import places, rules

FOLDER = Path(__file__).parent / "planted"
BAD = sorted((FOLDER / "bad").glob("*.py"))
CLEAN = sorted((FOLDER / "clean").glob("*.py"))
WORD = re.compile(r"\w+")


def is_found(path: Path, among: RuleSet) -> bool:
    """Whether something is said of the planted line, or of the import of a name in it."""
    text = path.read_text(encoding="utf-8")
    head = re.match(r"# planted: line (\d+), \S", text)
    assert head is not None, path.name
    number = int(head[1])
    lines = text.splitlines()
    words = set(WORD.findall(lines[number - 1]))
    for place in places(path, among):
        if place.line <= number <= place.end_line:
            return True
        before, _, names = lines[place.line - 1].partition("import ")
        is_import = before in ("", f"from {before[5:-1]} ")
        if is_import and words & set(WORD.findall(names)):
            return True
    return False


def listed(word: str) -> set[str]:
    rows = (FOLDER / "found.txt").read_text(encoding="utf-8").split("\n")
    return {row.partition(" ")[0] for row in rows if row and row.partition(" ")[2] in ("", word)}


def test_there_are_enough() -> None:
    assert len(BAD) >= 130
    assert len(CLEAN) >= 40
    assert listed("preview") <= {path.stem for path in BAD}


@pytest.mark.parametrize("word", ["", "preview"])
def test_planted_mistakes_are_found(word: str) -> None:
    among = rules(preview=bool(word))
    found = {path.stem for path in BAD if is_found(path, among)}
    assert sorted(listed(word) - found) == [], "no longer found"
    assert sorted(found - listed(word)) == [], "found now: add them to found.txt"


@pytest.mark.parametrize("path", CLEAN, ids=lambda path: path.stem)
def test_nothing_is_said_of_clean_scripts(path: Path) -> None:
    assert places(path, rules(preview=True)) == ()
