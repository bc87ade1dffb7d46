"""Reads JSON files of a run and of its user without torch: of limited size, and with checked content."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.errors import json_object, why_no_json

_MAX_BYTES = 2**22  # result.json has 0.2 kB; dataset.json names every class; a manifest every file
_MAX_CHANNELS = 1024  # MAX_CHANNELS of the images
_MAX_STREAMS = 1024
_NAMES = {
    "classes",
    "channels",
    "mean",
    "std",
    "train_samples",
    "val_samples",
    "train_fingerprint",
    "val_fingerprint",
    "model_file_sha256",
}


def json_file(path: Path) -> Any:
    """A JSON file's content; ValueError: no JSON, a name twice, no regular file, or too large."""
    if not path.is_file():
        if path.exists():
            raise ValueError("it is not a file")
        raise FileNotFoundError(path)
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it has more than {_MAX_BYTES} bytes")
    try:
        return json.loads(content, object_pairs_hook=json_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(why_no_json(error)) from None


def json_table(path: Path) -> Mapping[str, Any]:
    """The table in a JSON file; empty if missing, unreadable or something else."""
    try:
        return table(json_file(path))
    except (OSError, ValueError):
        return {}


def table(value: object) -> Mapping[str, Any]:
    """The value if it is a table, else an empty one."""
    return value if isinstance(value, dict) else {}


def json_row(line: bytes) -> dict[str, Any] | None:
    """A JSON object on a line; None if it is none, such as a killed run's torn last line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def metrics_row(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl, which has a step; None if it is not one."""
    row = json_row(line)
    return row if row is not None and whole_number(row.get("step")) is not None else None


def whole_number(value: object) -> int | None:
    """The value if it is a plausible count; else None."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18
    return value if is_count else None  # type: ignore[return-value]


def finite_number(value: object) -> float | None:
    """The value if it is a finite number; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def dataset_facts(path: Path) -> dict[str, Any]:
    """The content of dataset.json of a run; ValueError: why it is not what a run writes."""
    try:
        facts = json_file(path)
    except FileNotFoundError:
        raise ValueError("it is missing") from None
    except OSError as error:
        raise ValueError((error.strerror or str(error)).lower()) from None
    return checked_facts(facts)


def checked_facts(facts: object) -> dict[str, Any]:
    """The content of dataset.json; ValueError: not what a run writes."""
    if not isinstance(facts, dict):
        raise ValueError("it is no table")
    if missing := sorted(_NAMES - facts.keys()):
        raise ValueError(f"it has no {missing[0]!r}")
    odd = [name for name, value in facts.items() if not _is_what_a_run_writes(name, value, facts)]
    if odd:
        raise ValueError(f"{odd[0]!r} in it is not what a run writes")
    return facts


def _is_what_a_run_writes(name: str, value: Any, facts: Mapping[str, Any]) -> bool:
    if name == "classes":
        return isinstance(value, list) and all(isinstance(text, str) for text in value)
    if name in ("mean", "std"):
        is_list = isinstance(value, list) and len(value) == facts["channels"]
        numbers = [finite_number(number) for number in value] if is_list else [None]
        return all(one is not None and (one > 0 or name == "mean") for one in numbers)
    if name == "channels":
        return type(value) is int and 1 <= value <= _MAX_CHANNELS
    if name in ("train_samples", "val_samples", "test_samples"):
        return type(value) is int and 0 <= value < 10**18
    if name == "shuffle_streams":
        return type(value) is int and 1 <= value <= _MAX_STREAMS
    if name == "class_weights":
        is_list = isinstance(value, list) and len(value) == len(facts["classes"])
        return value is None or (is_list and all(type(one) in (int, float) for one in value))
    if name in ("train_content", "val_content", "train_names", "test_fingerprint"):
        return value is None or isinstance(value, str)
    if name not in _NAMES | {"teacher_sha256", "pixels"}:
        return True  # written by a later version
    return isinstance(value, str) or (value is None and name.endswith("sha256"))
