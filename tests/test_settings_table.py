"""docs/en/train.md shows every setting as the code has it, and the Chinese page names the same ones."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flambeau.train.settings import chinese_help
from flambeau.train.settings.field_checks import Range
from flambeau.train.settings.settings import FIELDS
from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "settings_table.py"
PAGE, CHINESE_PAGE = (
    (ROOT / "docs" / language / "train.md").read_text(encoding="utf-8") for language in ("en", "zh")
)


@pytest.fixture(scope="module")
def table() -> str:
    """What a maintainer sees who runs the tool."""
    command = [sys.executable, str(TOOL)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
    assert printed.stderr == ""
    return printed.stdout


def rows(text: str) -> Iterator[list[str]]:
    """The cells of the rows of the first table in a text."""
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def test_page_shows_the_table(table: str) -> None:
    lines = table.splitlines()
    assert len(lines) == 2 + len(FIELDS)
    assert f"\n\n{table}\n" in PAGE, f"run `python {TOOL.relative_to(ROOT)}` and put it in the page"


def test_table_says_what_the_settings_are(table: str) -> None:
    cells = {row[0]: row[1:] for row in rows(table)}
    assert cells["`--lr`"][0] == FIELDS["lr"].metadata["auto"]
    keep = FIELDS["keep"]
    meaning = keep.metadata["help"]
    assert cells["`--keep`"] == [f"`{keep.default}`", "at least 1", meaning, "may change"]
    assert cells["`--flip`, `--no-flip`"][0] == "yes"
    assert cells["`--seed`"][1::2] == ["at least 0 and below 2**64", "stays"]
    warmup = FIELDS["warmup"]
    meaning = warmup.metadata["help"]
    assert "%%" in meaning
    assert cells["`--warmup`"][:3] == [f"`{warmup.default}`", "", meaning.replace("%%", "%")]
    assert "sgd, adam, adamw" in cells["`--optimizer`"][2]


def test_chinese_page_shows_the_table_of_the_same_help() -> None:
    command = [sys.executable, str(TOOL), "--zh"]
    table = subprocess.run(
        command, check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout
    assert len(table.splitlines()) == 2 + len(FIELDS)
    assert f"\n\n{table}\n" in CHINESE_PAGE, (
        f"run `python {TOOL.relative_to(ROOT)} --zh` and put it in the page"
    )


def test_each_setting_has_its_help_in_chinese() -> None:
    """And a default that is a sentence in English is one, with the same numbers."""
    assert list(chinese_help.SETTINGS) == list(FIELDS)
    assert chinese_help.HEADINGS.keys() == {"main", *(f.metadata["group"] for f in FIELDS.values())}
    for name, (meaning, auto) in chinese_help.SETTINGS.items():
        english = FIELDS[name].metadata["auto"]
        assert re.search("[\u4e00-\u9fff]", meaning), name
        assert bool(auto) == bool(english), name
        digits = re.compile(r"(?<![a-z])\d+(?:\.\d+)?(?:ep|%%)?")
        assert set(digits.findall(auto)) == set(digits.findall(english)), name


def test_a_new_setting_changes_the_table(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_script(TOOL)
    assert tool.settings_table() + "\n" == table

    @dataclasses.dataclass
    class More:
        new_one: int = dataclasses.field(
            default=7,
            metadata={
                "help": "a share of 10%%",
                "auto": "",
                "choices": (),
                "neutral": True,
                "range": Range(0, 9, above_low=True),
            },
        )

    monkeypatch.setattr(tool, "FIELDS", {f.name: f for f in dataclasses.fields(More)})
    assert tool.settings_table().splitlines()[2:] == [
        "| `--new-one` | `7` | above 0 and at most 9 | a share of 10% | may change |"
    ]
