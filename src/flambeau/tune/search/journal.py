"""The trials of `flambeau tune`, one JSON line each, in a file that may have been cut off anywhere."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.tune.search.levers import Choice, TrainFacts

Row = dict[str, Any]
"""A trial: key, choice, step_s, bytes, start_s, failure; if known also losses, run and loader."""


class Journal:
    """Appends the trials of the search `key`, and gives back those of an interrupted one."""

    def __init__(self, file: Path, key: str) -> None:
        self._file, self._key = file, key
        # An unreadable line is None: only its own trial is run again.
        self._earlier: list[Row | None] = self._read()

    def take(self, choice: Choice) -> Row | None:
        """The row of an interrupted search if this trial was its next one; each row is returned once."""
        wanted = dict(choice)
        index = next((n for n, row in enumerate(self._earlier) if row is not None), None)
        if index is None:
            self._earlier.clear()
            return None
        row = self._earlier[index]
        if row is not None and row["choice"] == wanted:
            del self._earlier[: index + 1]
            return row
        if index:  # the unreadable line before may have been this trial
            del self._earlier[0]
        else:  # the searches differ from here on
            self._earlier.clear()
        return None

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a trial of this search, on a new line even if the last one was cut off."""
        line = json.dumps({"key": self._key, **row}).encode() + b"\n"
        with self._file.open("ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":  # cut off by a kill
                    line = b"\n" + line
            file.write(line)

    def _read(self) -> list[Row | None]:
        if not self._file.exists():
            return []
        rows: list[Row | None] = []
        for line in self._file.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # cut off, or no JSON
                rows.append(None)
                continue
            if isinstance(row, dict) and row.get("key") != self._key and "key" in row:
                continue
            rows.append(row if is_row(row) else None)
        # A failure without any lever has been fixed since, or soon fails again.
        return [row for row in rows if row is None or row["choice"] or not row["failure"]]


def is_row(row: object) -> bool:
    """Whether it has the fields of a trial: a line may be cut, edited, or of another version."""
    if not isinstance(row, dict):
        return False
    choice, failure = row.get("choice"), row.get("failure")
    costs = row.get("step_s"), row.get("bytes")
    is_whole = failure == "" and all(_is_number(cost) for cost in costs) and costs[0] != 0
    has_failed = isinstance(failure, str) and failure != "" and costs == (None, None)
    return (
        isinstance(choice, dict)
        and all(isinstance(value, str) for value in choice.values())
        and (is_whole or has_failed)
        and _is_number(row.get("start_s"))
        and isinstance(row.get("losses", []), list)
        and all(_is_number(loss, is_finite=False) for loss in row.get("losses", []))
        and _is_run_facts(row.get("run"))
        and _is_loader_facts(row.get("loader"))
    )


def _is_number(value: object, *, is_finite: bool = True) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return not is_finite or (math.isfinite(value) and value >= 0)
    except OverflowError:  # an integer beyond all floats, of an edited line
        return False


def _is_run_facts(run: object) -> bool:
    if run is None:
        return True
    if not isinstance(run, dict) or not run.keys() <= {
        f.name for f in dataclasses.fields(TrainFacts)
    }:
        return False
    counts = [run.get("batch_size"), run.get("accumulate", 1)]
    others = [value for name, value in run.items() if name not in ("batch_size", "accumulate")]
    return all(isinstance(one, int) and _is_number(one) and one > 0 for one in counts) and all(
        value is None or _is_number(value) for value in others
    )


def _is_loader_facts(loader: object) -> bool:
    if loader is None:
        return True
    if not isinstance(loader, dict) or not isinstance(loader.get("repeats"), bool):
        return False
    shared = loader.get("shared")
    return isinstance(shared, list) and all(isinstance(name, str) for name in shared)
