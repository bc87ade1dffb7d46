"""docs/schemas: one for each command with `--json`, strict, and compared with what commands print."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from flambeau.cli import table
from flambeau.cli.command import build_parser
from json_schemas import SCHEMAS


def commands_with_json() -> set[str]:
    (verbs,) = [
        one for one in build_parser([])._actions if isinstance(one, argparse._SubParsersAction)
    ]
    return {
        name
        for name, parser in verbs.choices.items()
        if {"--json", "--json-lines"} & {*parser._option_string_actions}
    }


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """The schemas of objects with named properties in a schema."""
    if isinstance(schema, dict):
        if "properties" in schema and isinstance(schema["properties"], dict):
            yield schema
        for value in schema.values():
            yield from objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from objects(value)


def test_each_command_with_json_has_a_schema() -> None:
    # recipes prints it by its verbs, `lint` by --output-format, and `error` is of all commands
    expected = commands_with_json() | {"recipes", "lint", "lint_rule", "error"}
    assert {path.stem for path in SCHEMAS.iterdir()} == expected


@pytest.mark.parametrize("path", sorted(SCHEMAS.iterdir()), ids=lambda path: path.stem)
def test_a_schema_is_one_and_takes_nothing_unknown(path: Any) -> None:
    schema = json.loads(path.read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    found = list(objects(schema))
    assert found
    for one in found:
        assert "additionalProperties" in one, one
        assert {*one["required"]} <= {*one["properties"]}


def test_what_is_printed_is_compared(
    flambeau: Any, images: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fixture itself: a command that prints what no schema has fails its test."""
    assert flambeau("pack", images, images.parent / "a.rec", "--json").code == 0
    facts = table.json_facts
    monkeypatch.setattr(table, "json_facts", lambda row: facts({**row, "unknown": 1}))
    with pytest.raises(ValidationError, match="unknown"):
        flambeau("pack", images, images.parent / "b.rec", "--json")


def test_json_has_no_other_values_than_json() -> None:
    row = {"a": float("nan"), "b": [float("inf"), 1.5], "c": {1: SCHEMAS}, "d": True, "e": None}
    assert table.json_facts(row) == {
        "a": None,
        "b": [None, 1.5],
        "c": {"1": str(SCHEMAS)},
        "d": True,
        "e": None,
    }
