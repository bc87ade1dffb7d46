"""The table of slow tests names tests that are there."""

from pathlib import Path

import pytest

from slow_cases import CASES, FIXTURES


@pytest.mark.parametrize("case", [*CASES, *FIXTURES])
def test_it_is_there(case: str) -> None:
    file, _, test = case.partition("::")
    name, bracket, _ = test.partition("[")
    assert f"def {name}(" in (Path(__file__).parent / file).read_text(encoding="utf-8")
    assert not bracket or CASES[case] == 0  # a single case is slow, or not in the table
