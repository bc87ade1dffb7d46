"""The coverage pages: every row of the cookbook this project started from that is promised has its answer."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "en" / "coverage.md"
CHINESE_PAGE = ROOT / "docs" / "zh" / "coverage.md"
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


def rows(text: str) -> dict[str, list[tuple[str, str]]]:
    """The targets of each row: (path from docs/, anchor or nothing)."""
    found = _ROW.findall(text)
    assert len({row for row, _, _ in found}) == len(found), "a row is listed twice"
    return {row: _LINK.findall(targets) for row, _, targets in found}


ROWS, CHINESE_ROWS = (rows(page.read_text(encoding="utf-8")) for page in (PAGE, CHINESE_PAGE))


def headings(path: Path) -> set[str]:
    """Anchors as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines}


def test_no_row_is_missing_and_none_is_invented() -> None:
    assert set(ROWS) == PROMISED
    assert list(CHINESE_ROWS) == list(ROWS)


@pytest.mark.skipif(not COOKBOOK.exists(), reason=f"{COOKBOOK.name} is not here")
def test_the_themes_are_those_of_the_cookbook() -> None:
    text = COOKBOOK.read_text(encoding="utf-8")
    known = set(re.findall(r"^\| ([A-Z]+-\d\d) \|", text, re.MULTILINE))
    assert {row for row in known if row.split("-")[0] in THEMES} == PROMISED


@pytest.mark.parametrize("row", sorted(PROMISED))
def test_the_answer_is_there(row: str) -> None:
    for page, found in ((PAGE, ROWS[row]), (CHINESE_PAGE, CHINESE_ROWS[row])):
        assert found, "no target"
        for target, anchor in found:
            path = (page.parent / target).resolve()
            assert path.is_relative_to(ROOT)
            assert path.exists(), target
            assert not anchor or anchor in headings(path), f"{target} has no heading #{anchor}"
    files = [[target for target, _ in found] for found in (ROWS[row], CHINESE_ROWS[row])]
    assert files[0] == files[1]
