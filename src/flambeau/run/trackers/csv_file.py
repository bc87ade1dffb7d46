"""metrics.csv in the run folder: a row per line of metrics.jsonl, whole at any moment.

It grows by whole rows; at each start and with each new column a new file replaces it.
"""

import csv
import io
from collections.abc import Mapping
from typing import Any

from flambeau.run.trackers.tracker import START, Position, TrackedRun


class CsvFile:
    """Writes metrics.csv; see `Tracker`."""

    flush_s = 1.0

    def __init__(self, facts: TrackedRun) -> None:
        self._path = facts.folder / "metrics.csv"
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []  # not written yet

    def start(self) -> Position:
        """It needs all lines again, for a new file."""
        return START

    def line(self, step: int, figures: dict[str, float]) -> None:
        self._rows.append({"step": step, **figures})

    def rewind(self, position: Position) -> Position:
        rows = [row for row in self._all_rows() if int(row["step"]) < position.step]
        self._columns = []
        self._rows = rows
        self.flush(position)
        return Position(position.step, 0)

    def _all_rows(self) -> list[dict[str, Any]]:
        if not self._columns:
            return self._rows
        with self._path.open(encoding="utf-8", newline="") as file:
            return [*csv.DictReader(file), *self._rows]

    def flush(self, sent: Position) -> None:
        names = [name for row in self._rows for name in row]
        columns = list(dict.fromkeys([*self._columns, *names]))
        if columns == self._columns:
            with self._path.open("a", encoding="utf-8", newline="") as file:
                file.write(_text(columns, self._rows))
        else:
            new = self._path.with_name(".metrics.csv.new")
            rows = self._all_rows()
            header = dict(zip(columns, columns, strict=True))
            new.write_text(_text(columns, [header, *rows]), encoding="utf-8", newline="")
            new.replace(self._path)
        self._columns = columns
        self._rows = []

    def end(self, result: Mapping[str, Any] | None) -> None:
        """Nothing is open."""


def _text(columns: list[str], rows: list[dict[str, Any]]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, lineterminator="\n").writerows(rows)
    return text.getvalue()
