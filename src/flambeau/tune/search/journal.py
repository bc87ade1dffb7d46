"""The trials of `flambeau tune`, a line of JSON each, in a file that a kill may have cut anywhere."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.tune.search.levers import Choice, RunFacts

Row = dict[str, Any]
"""A trial: key, choice, step_s, bytes, start_s, failure, and where they are known losses, run and loader."""


class Journal:
    """Rows of one search, appended one by one, and those of an interrupted one to be taken up.

    Args:
        file: that need not be there.
        key: of the search; rows of others are passed over.
    """

    def __init__(self, file: Path, key: str) -> None:
        self._file, self._key = file, key
        # A line that cannot be read is None: its trial is run again, and those around it stay.
        self._earlier: list[Row | None] = self._read()

    def take(self, choice: Choice) -> Row | None:
        """The row of an interrupted search, if this trial was its next one; it is given once."""
        wanted = dict(choice)
        at = next((n for n, row in enumerate(self._earlier) if row is not None), None)
        if at is None:
            self._earlier.clear()
            return None
        row = self._earlier[at]
        if row is not None and row["choice"] == wanted:
            del self._earlier[: at + 1]
            return row
        if at:  # the one that is asked for may be in the line before
            del self._earlier[0]
        else:  # from where two searches part, nothing of the earlier one counts
            self._earlier.clear()
        return None

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a trial of this search, on a line of its own whatever the file ends with."""
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
            except (ValueError, RecursionError):  # cut off, or no row at all
                rows.append(None)
                continue
            if isinstance(row, dict) and row.get("key") != self._key and "key" in row:
                continue
            rows.append(row if is_row(row) else None)
        # What was wrong with the run as it is has been put right, or else fails again soon.
        return [row for row in rows if row is None or row["choice"] or not row["failure"]]


def is_row(row: object) -> bool:
    """Whether it has what a trial has, in its types: a line may be cut, edited, or of another version."""
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
    return not is_finite or (math.isfinite(value) and value >= 0)


def _is_run_facts(run: object) -> bool:
    if run is None:
        return True
    if not isinstance(run, dict) or not run.keys() <= {
        f.name for f in dataclasses.fields(RunFacts)
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
