"""docs/coverage.md: every row of the source notes that is promised has an answer, and the answer is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "coverage.md"
COOKBOOK = ROOT.parent / "shared" / "COOKBOOK.md"
THEMES = {
    "REP": 7,
    "AMP": 19,
    "FT": 14,
    "TRK": 15,
    "SCH": 8,
    "CKP": 12,
    "MEM": 11,
    "DAT": 34,
    "IMG": 4,
}
PROMISED = {f"{theme}-{n:02}" for theme, rows in THEMES.items() for n in range(1, rows + 1)}
_ROW = re.compile(r"^\| ([A-Z]+-\d\d) \| (.+) \| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)(?:#([^)]+))?\)")


def halves(path: Path = PAGE) -> tuple[str, str]:
    """The English and the Chinese part of a page: each has a title of its own."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    _, english, chinese = re.split(r"^# ", text, flags=re.M)
    return english, chinese


def rows(text: str) -> dict[str, list[tuple[str, str]]]:
    """The targets of each row: (path from docs/, anchor or nothing)."""
    found = _ROW.findall(text)
    assert len({row for row, _, _ in found}) == len(found), "a row is listed twice"
    return {row: _LINK.findall(targets) for row, _, targets in found}


ROWS = rows(halves()[0]) if PAGE.exists() else {}


def headings(path: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_no_row_is_missing_and_none_is_invented() -> None:
    for half in halves():
        assert set(rows(half)) == PROMISED
    assert rows(halves()[1]) == ROWS


@pytest.mark.skipif(not COOKBOOK.exists(), reason=f"{COOKBOOK.name} is not here")
def test_the_themes_are_those_of_the_cookbook() -> None:
    text = COOKBOOK.read_text(encoding="utf-8")
    known = set(re.findall(r"^\| ([A-Z]+-\d\d) \|", text, re.MULTILINE))
    assert {row for row in known if row.split("-")[0] in THEMES} == PROMISED


@pytest.mark.parametrize("row", sorted(PROMISED))
def test_the_answer_is_there_and_names_the_row(row: str) -> None:
    assert ROWS[row], "no target"
    named = False
    for target, anchor in ROWS[row]:
        path = (PAGE.parent / target).resolve()
        assert path.is_relative_to(ROOT)
        assert path.exists(), target
        assert not anchor or anchor in headings(path), f"{target} has no heading #{anchor}"
        named = named or all(row in half for half in halves(path))
    assert named, f"no target says {row} in both languages"
