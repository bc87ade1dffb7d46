"""A second set of planted mistakes, written before its author had seen a rule or the first set.

planted_second/cases.tsv says what is wrong, and in which line.
planted_second/found.tsv says which rule names it and in which line, by default or with --preview, in the
first run and now; a case that no rule names has '-' there, and why that stays so.
What is missing (a call of eval(), say) is named at another line than that which cases.tsv marks.
"""

import csv
from pathlib import Path

import pytest

from linted import places, rules

FOLDER = Path(__file__).parent / "planted_second"
CLEAN = sorted((FOLDER / "clean").glob("*.py"))
ALSO_RIGHT = {("bad/27.py", "FLB2111")}  # Variable is imported, which is no longer needed


def table(name: str) -> dict[str, dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file, delimiter="\t")}


CASES = table("cases.tsv")
FOUND = table("found.tsv")


def count(column: str, *words: str) -> int:
    return sum(row[column] in words for row in FOUND.values())


def test_each_case_is_accounted_for() -> None:
    assert len(CASES) == 80
    assert len(CLEAN) == 40
    assert CASES.keys() == FOUND.keys()
    assert count("first", "default") == 47
    assert count("first", "default", "preview") == 52
    assert all(bool(row["why"]) == (row["now"] == "-") for row in FOUND.values())


@pytest.mark.parametrize("preview", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_found(name: str, preview: bool) -> None:
    row = FOUND[name]
    is_named = row["now"] == "default" or (preview and row["now"] == "preview")
    expected = {(row["code"], int(row["line"]))} if is_named else set()
    named = {(place.code, place.line) for place in places(FOLDER / name, rules(preview=preview))}
    assert {one for one in named if (name, one[0]) not in ALSO_RIGHT} == expected


@pytest.mark.parametrize("path", CLEAN, ids=lambda path: path.stem)
def test_nothing_is_said_of_clean_scripts(path: Path) -> None:
    assert places(path, rules(preview=True)) == ()
