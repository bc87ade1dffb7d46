"""What is derived from the declared options is up to date: keywords, lines of help, tables of pages."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import flambeau
from flambeau.run.options.option import GROUPS, Range, option, options_of, plain_text
from flambeau.run.options.run_options import RunOptions
from flambeau.trainer.settings.settings import FIELDS
from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "write_options.py"
OPTIONS = [*options_of(RunOptions).values(), *FIELDS.values()]


def test_nothing_is_out_of_date() -> None:
    command = [sys.executable, str(TOOL), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_reference_is_that_of_the_code(language: str) -> None:
    tool = load_script(TOOL.with_name("write_reference.py"))
    page = ROOT / "docs" / language / "reference.md"
    assert page.read_text(encoding="utf-8") == tool.page(language)
    assert set(tool.DOORS) == set(flambeau.__all__)


def test_an_option_that_is_changed_is_written_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = load_script(TOOL)
    changed: Any = option(7, "a line of help", "一行帮助", group="length", range=Range(0, 9))
    changed.name, changed.type = "accumulate", int
    monkeypatch.setattr(tool, "FIELDS", {**FIELDS, "accumulate": changed})
    stale = {
        path.relative_to(ROOT): set(text.splitlines()) - set(path.read_text().splitlines())
        for path, text in tool.written().items()
    }
    assert stale.pop(Path("src/flambeau/trainer/api.py")) == {
        "    accumulate: int = 7,",
        "        accumulate: a line of help (from 0 to 9).",
    }
    assert stale.pop(Path("docs/en/train.md")) == {
        "| `--accumulate` | `7` | from 0 to 9 | a line of help | stays |"
    }
    assert stale.pop(Path("docs/zh/train.md")) == {
        "| `--accumulate` | `7` | 从 0 到 9 | 一行帮助 | 不变 |"
    }
    assert not any(stale.values())


@pytest.mark.parametrize(
    ("door", "fields"),
    [
        (flambeau.Run, options_of(RunOptions)),
        (flambeau.train, {n: f for n, f in FIELDS.items() if n not in ("data", "track")}),
    ],
)
def test_doors_show_every_keyword_with_its_default_and_a_line(door: Any, fields: Any) -> None:
    shown = inspect.signature(door).parameters
    function = door.__init__ if inspect.isclass(door) else door
    help_of = " ".join((inspect.getdoc(function) or "").split())
    for name, field in fields.items():
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        assert shown[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert shown[name].default == default
        assert f" {name}: " in help_of
    assert inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in shown.values()}


@pytest.mark.parametrize("field", OPTIONS, ids=lambda field: field.name)
def test_each_option_has_its_line_in_both_languages(field: dataclasses.Field[Any]) -> None:
    """And a default that is a sentence in English is one in Chinese, with the same numbers."""
    assert field.metadata["group"] in GROUPS
    english, chinese = field.metadata["auto"]
    assert field.metadata["text"][-1] not in ".。"
    assert re.search("[\u4e00-\u9fff]", field.metadata["chinese"])
    assert bool(english) == bool(chinese)
    digits = re.compile(r"(?<![a-z])\d+(?:\.\d+)?(?:ep|%)?")
    assert set(digits.findall(chinese)) == set(digits.findall(english))
    links = [re.findall(r"\]\(([^)#]*)", field.metadata[key]) for key in ("text", "chinese")]
    assert links[0] == links[1]
    assert "](" not in plain_text(field.metadata["text"])
