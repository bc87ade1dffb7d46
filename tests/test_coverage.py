"""The coverage pages list every row of the cookbook this project started from, each with its answer."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "en" / "coverage.md"
CHINESE_PAGE = ROOT / "docs" / "zh" / "coverage.md"
COOKBOOK = ROOT.parent / "shared" / "COOKBOOK.md"
_ROW = re.compile(r"^\| ([A-Z]+-\d\d) \| (.+) \| (.+) \|$", re.MULTILINE)
_SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)#]+)(?:#([^)]+))?\)")


def listed(page: Path) -> list[tuple[str, str]]:
    """(row, where) in the order of the page; every line of its tables but their heads is one."""
    text = page.read_text(encoding="utf-8")
    found = [(row, where) for row, _, where in _ROW.findall(text)]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == len(found) + 2 * len(_SECTION.findall(text)), "a line of a table is no row"
    return found


ENGLISH, CHINESE = listed(PAGE), listed(CHINESE_PAGE)


def headings(path: Path) -> list[str]:
    """Anchors as GitHub makes them; a comment in a block of code is no heading."""
    text = re.sub(
        r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    lines = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", line.lower()).strip().replace(" ", "-") for line in lines]


def place(page: Path, target: str, anchor: str) -> tuple[str, int | None]:
    """The file, and which of its headings: the same in both languages."""
    path = (page.parent / target).resolve()
    assert path.is_relative_to(ROOT)
    assert path.is_file(), target
    if not anchor:
        return target, None
    assert anchor in headings(path), f"{target} has no heading #{anchor}"
    return target, headings(path).index(anchor)


def test_no_row_is_listed_twice() -> None:
    assert [row for row, count in Counter(row for row, _ in ENGLISH).items() if count > 1] == []
    assert [row for row, _ in CHINESE] == [row for row, _ in ENGLISH]


@pytest.mark.skipif(not COOKBOOK.exists(), reason=f"{COOKBOOK.name} is not here")
def test_every_row_of_every_theme_is_listed() -> None:
    text = COOKBOOK.read_text(encoding="utf-8")
    rows_of = {
        name: re.findall(r"^\| ([A-Z]+-\d\d) \|", body, re.MULTILINE)
        for name, body in _SECTION.findall(text)
    }
    counts = dict(re.findall(r"^\| ([^|*]+) \| (\d+) \|$", text, re.MULTILINE))
    themes = [name for name in rows_of if rows_of[name]]
    assert len(themes) == len(counts)
    assert sorted(len(rows_of[name]) for name in themes) == sorted(map(int, counts.values()))
    for page in (PAGE, CHINESE_PAGE):
        sections = _SECTION.findall(page.read_text(encoding="utf-8"))
        found = [[row for row, _, _ in _ROW.findall(body)] for _, body in sections]
        assert sorted(found) == sorted(rows_of[name] for name in themes)


@pytest.mark.parametrize("index", range(len(ENGLISH)), ids=[row for row, _ in ENGLISH])
def test_a_row_has_its_answer(index: int) -> None:
    answers = []
    for page, rows in ((PAGE, ENGLISH), (CHINESE_PAGE, CHINESE)):
        where = rows[index][1]
        assert re.fullmatch(rf"{_LINK.pattern}(, {_LINK.pattern})*", where), where
        answers.append([place(page, *link) for link in _LINK.findall(where)])
    assert answers[0] == answers[1]
