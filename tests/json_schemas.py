"""What commands print with `--json`, compared with docs/schemas wherever a test runs one in its process."""

import functools
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMAS = Path(__file__).parents[1] / "docs" / "schemas"
_COMMANDS = {"inspect_model": "inspect", "command": "error"}
"""Of modules that have another name than their command."""


@functools.cache
def validator(command: str) -> Draft202012Validator:
    """The schema of a command, in which an object has no other properties than it names."""
    return Draft202012Validator(json.loads((SCHEMAS / f"{command}.json").read_text("utf-8")))


def command_that_prints() -> str:
    """By the module of flambeau.cli that is calling."""
    frame = sys._getframe(1)
    while True:
        place, _, name = frame.f_globals.get("__name__", "").rpartition(".")
        if place == "flambeau.cli" and name != "table":
            return _COMMANDS.get(name, name)
        assert frame.f_back is not None
        frame = frame.f_back


def compared(
    json_facts: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """`flambeau.cli.table.json_facts`, whose rows are compared with the schema of the command."""

    def facts(row: Mapping[str, Any]) -> dict[str, Any]:
        found = json_facts(row)
        # An error of `train --json-lines` is an event, too, and printed by flambeau.cli.command.
        command = "train" if "event" in found else command_that_prints()
        validator(command).validate(found)
        return found

    return facts
