"""The pages list the rules as they are."""

from pathlib import Path

import pytest

from flambeau_lint.rules.catalog import RULES
from load_script import load_script

ROOT = Path(__file__).resolve().parents[2]
TOOL = load_script(ROOT / "tools" / "write_rules.py")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_is_up_to_date(language: str) -> None:
    page = ROOT / "docs" / language / "lint.md"
    text = page.read_text(encoding="utf-8")
    assert TOOL.written(page, language) == text, "run python tools/write_rules.py"
    assert text.count("\n| FLB") >= len(RULES)
