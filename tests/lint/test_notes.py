"""The mistakes and old names that the notes' snippets hold, and what is said of each.

The notes are those that this project began from; a file of notes/ is one row of their table, by its number
(`trk_07`), as a snippet of theirs would be written.
Left out are rows whose snippet is right, claims in prose, commands of a shell, names that are not defined
(ruff's F821), and what Python itself refuses to read.

A line with a mistake ends in `# here: ` and the codes that name it; `preview` behind them: with --preview
alone; `left`, and the reason: nothing names it, and no rule could without guessing.
"""

import re
from pathlib import Path

import pytest

from flambeau_lint.engine import RuleSet
from linted import places, rules

NOTES = sorted((Path(__file__).parent / "notes").glob("*.py"))
MARK = re.compile(r"  # here: (?:(FLB\d+(?: FLB\d+)*)( preview)?|left, (\S.+))$")
BY_DEFAULT = rules(preview=False)
WITH_PREVIEW = rules(preview=True)


def marks(path: Path) -> dict[int, re.Match[str]]:
    """The marked lines, by their number."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if "# here" in line:
            mark = MARK.search(line)
            assert mark is not None, f"{path.name}:{number}: {line}"
            found[number] = mark
    return found


def named(path: Path, among: RuleSet) -> set[tuple[int, str]]:
    return {(place.line, place.code) for place in places(path, among)}


def standing(path: Path) -> str:
    """A row stands where the worst of its lines does."""
    found = marks(path).values()
    if any(mark[3] for mark in found):
        return "left"
    return "preview" if any(mark[2] for mark in found) else "default"


def test_each_row_is_accounted_for() -> None:
    assert all(marks(path) for path in NOTES)
    found = [standing(path) for path in NOTES]
    counts = {kind: found.count(kind) for kind in ("default", "preview", "left")}
    assert counts == {"default": 53, "preview": 5, "left": 31}


@pytest.mark.parametrize("path", NOTES, ids=lambda path: path.stem)
def test_what_is_found(path: Path) -> None:
    by_default, with_preview = set(), set()
    for number, mark in marks(path).items():
        codes = {(number, code) for code in (mark[1] or "").split()}
        with_preview |= codes
        by_default |= set() if mark[2] else codes
    assert named(path, BY_DEFAULT) == by_default
    assert named(path, WITH_PREVIEW) == with_preview
