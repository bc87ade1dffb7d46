"""The pages list the rules as they are; rules, pages and `flambeau doctor` name each other."""

import re
from pathlib import Path

import pytest

from flambeau.cli.recipe_search import section
from flambeau_lint.reports import PAGES, rule_page
from flambeau_lint.rules.catalog import BY_CODE, RULES
from load_script import load_script

ROOT = Path(__file__).resolve().parents[2]
TOOL = load_script(ROOT / "tools" / "write_rules.py")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_is_up_to_date(language: str) -> None:
    page = ROOT / "docs" / language / "lint.md"
    text = page.read_text(encoding="utf-8")
    assert TOOL.written(page, language) == text, "run python tools/write_rules.py"
    assert text.count("\n| FLB") >= len(RULES)


def rows_of_pages(language: str) -> dict[str, list[str]]:
    """The table 'more about some rules': of each code, what its row links to."""
    text = (ROOT / "docs" / language / "lint.md").read_text(encoding="utf-8")
    found = {}
    for line in text.splitlines():
        match = re.match(r"\| FLB(\d+)(?: (?:to|至) FLB(\d+))?[,，].*\| (.*) \|$", line)
        if match is not None:
            first = int(match[1])
            for number in range(first, int(match[2] or first) + 1):
                found[f"FLB{number}"] = re.findall(r"\]\(([^)]+)\)", match[3])
    return found


def test_rules_link_to_pages() -> None:
    assert rows_of_pages("en") == {code: list(pages) for code, pages in PAGES.items()}
    for code, pages in PAGES.items():
        page = rule_page(BY_CODE[code])
        assert all(f"flambeau recipes page {one}\n" in page for one in pages)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_pages_link_back_to_their_rules(language: str) -> None:
    mark = {"en": "more-about-some-rules", "zh": "部分规则的更多说明"}[language]
    assert rows_of_pages(language).keys() == PAGES.keys()
    for code, links in rows_of_pages(language).items():
        assert len(links) == len(PAGES[code])
        for link in links:
            name, _, anchor = link.partition("#")
            text = (ROOT / "docs" / language / name).read_text(encoding="utf-8")
            part = section(text, anchor) if anchor else text
            assert part is not None, link
            (back,) = [line for line in part.splitlines() if f"lint.md#{mark}" in line]
            named = re.findall(r"FLB(\d+)", back)
            assert int(named[0]) <= int(code[3:]) <= int(named[-1]), (link, back)


def test_rules_that_flambeau_names_exist() -> None:
    """In what `doctor` says, for one."""
    named = {
        (path.name, code)
        for path in (ROOT / "src" / "flambeau").rglob("*.py")
        for code in re.findall(r"\bFLB\d+\b", path.read_text(encoding="utf-8"))
    }
    assert len(named) >= 15
    assert {code for _, code in named} <= BY_CODE.keys()
