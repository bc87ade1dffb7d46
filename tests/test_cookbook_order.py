"""A section of a cookbook page answers in one order, that of CONTRIBUTING.md, and both languages in the same.

The parts from 'when not' on are found by the words that they begin with: a line with such a word begins
a part, and the lines below it belong to it until the next one or the end of the section.
A heading may be one, too: then a whole page has this order.

    python tests/test_cookbook_order.py [PAGE ...]

prints what stands in another order.
"""

import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest

from flambeau.terminal import say
from test_cookbook_blocks import cookbook_pages
from test_docs import ROOT, Page, parse, read

PARTS = {
    "when not": r"When not\b|Not for|什么时候不|不适合",
    "what goes wrong": r"What goes wrong|Common mistakes|常见错误|会出什么问题",
    "cost": r"Cost:|Measured:|What it costs|代价|实测：",
    "old code": r"(What old|Old) code|旧代码",
}
COST, OLD_CODE = 2, 3
"""Places in PARTS."""
LEAD = 2
"""Lines of prose before the code or the table of a section: what to write today, in words."""
ANSWER = re.compile(r"```$|[|!]|1\. ")
"""A block, a table, a picture, or the first of numbered steps."""
OLD = re.compile(
    r"\bdeprecated\b|\b(old|older) (code|repositories)\b|\boften pasted\b|弃用|旧代码",
    re.IGNORECASE,
)
ABOUT_OLD_CODE = {"errors_and_old_names.md", "parallel/from_apex_and_old_launchers.md"}
OF_A_COMMAND = {"doctor.md", "lint.md", "sweep.md", "tune.md"}
"""Their sections explain what the command does."""


class Section(NamedTuple):
    heading: str
    rows: list[tuple[int, str]]  # prose without blank lines, and '```' for a block


def sections(page: Page) -> Iterator[Section]:
    """From each `##` or `###` to the next heading, of whatever level."""
    rows = [*page.prose, *((block.line - 1, "```") for block in page.blocks)]
    section = None
    for number, row in sorted(rows):
        if re.match("#+ ", row):
            if section:
                yield section
            section = Section(row, []) if row.startswith("##") else None
        elif section and row.strip():
            section.rows.append((number, row))
    if section:
        yield section


def part_of(row: str) -> int | None:
    """Which of PARTS begins with this line."""
    text = re.sub(r"^[#\s*\d.-]+", "", row)
    return next((n for n, words in enumerate(PARTS.values()) if re.match(words, text)), None)


def parts_in(rows: list[tuple[int, str]]) -> list[tuple[int, int]]:
    """The line and the part, of each line that begins one."""
    return [(number, part) for number, row in rows if (part := part_of(row)) is not None]


def order_breaches(rows: list[tuple[int, str]]) -> Iterator[str]:
    found = parts_in(rows)
    for (_, before), (number, part) in pairwise(found):
        if part <= before:
            names = [*PARTS]
            yield f"line {number}: '{names[part]}' comes behind '{names[before]}'"


def lead_breaches(section: Section) -> Iterator[str]:
    places = [place for place, (_, row) in enumerate(section.rows) if ANSWER.match(row)]
    if places and places[0] > LEAD:
        number = section.rows[places[0]][0]
        yield f"line {number}: {places[0]} lines stand before the code or table; {LEAD} may"


def old_code_breaches(section: Section) -> Iterator[str]:
    part = part_of(section.heading)
    for number, row in section.rows:
        begun = part_of(row)
        part = part if begun is None else begun
        if row[0] != "|" and OLD.search(row) and part != OLD_CODE:
            yield f"line {number}: this is of old code, which comes last, behind 'Old code:'"


def cost_breaches(section: Section) -> Iterator[str]:
    for number, row in section.rows:
        if part_of(row) == COST and not re.search(r"\d", row):
            yield f"line {number}: what it costs needs a figure"


def breaches(page: Page, name: str) -> Iterator[str]:
    yield from order_breaches([row for row in page.prose if row[1].startswith("## ")])
    for section in sections(page):
        yield from order_breaches(section.rows)
        yield from lead_breaches(section)
        yield from cost_breaches(section)
        if name not in ABOUT_OLD_CODE:
            yield from old_code_breaches(section)


def ordered_pages() -> list[str]:
    return [name for name in cookbook_pages() if name not in OF_A_COMMAND]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("name", ordered_pages())
def test_sections_answer_in_one_order(name: str, language: str) -> None:
    assert list(breaches(read(ROOT / "docs" / language / name), name)) == []


PAGE = """# Page

## Heading

Write this:

```python
x = 1
```

It is right.

- When not: never.
- What goes wrong: `x` is 2.
  This belongs to it.
- Cost: 1 ms.
- Old code wrote 2, which is deprecated.
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "", None),
        ("- When not: never.", "It is cheap.", None),
        ("Write this:", "One.\nTwo.\nWrite this:", "3 lines stand before the code"),
        ("- When not", "- Old code did.\n- When not", "'when not' comes behind 'old code'"),
        ("- Cost:", "- What goes wrong:", "comes behind 'what goes wrong'"),
        ("- Cost: 1 ms.", "- Cost: 1 ms.\n- When not: ever.", "'when not' comes behind 'cost'"),
        ("- Cost: 1 ms.", "- Cost: a little.", "line 16: what it costs needs a figure"),
        ("It is right.", "Older code has 2.", "line 11: this is of old code"),
        ("It is right.", "| 2 | deprecated |", None),
        (
            "# Page",
            "# Page\n\n## What it costs\n\n## When not to",
            "'when not' comes behind 'cost'",
        ),
        ("## Heading", "### 旧代码怎么写\n\n它已弃用。\n\n### Heading", None),
    ],
)
def test_another_order_is_found(old: str, new: str, message: str | None) -> None:
    found = list(breaches(parse(PAGE.replace(old, new, 1)), "page.md"))
    assert len(found) == (message is not None)
    assert all((message or "") in breach for breach in found)


@pytest.mark.parametrize("name", ordered_pages())
def test_both_languages_have_the_same_parts(name: str) -> None:
    english, chinese = (
        [
            [part for _, part in parts_in(one.rows)]
            for one in sections(read(ROOT / "docs" / language / name))
        ]
        for language in ("en", "zh")
    )
    assert english == chinese


def main(names: list[str]) -> None:
    for name in names or ordered_pages():
        for language in ("en", "zh"):
            for breach in breaches(read(ROOT / "docs" / language / name), name):
                say(f"{language}/{name}: {breach}")


if __name__ == "__main__":
    main(sys.argv[1:])
