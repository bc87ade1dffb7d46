"""metrics.csv in the run folder: a row for each line of metrics.jsonl, whole at any moment.

It grows by whole rows; at each start, and where a new column comes, a new file takes its place.
"""

import csv
import io
from collections.abc import Mapping
from typing import Any

from flambeau.run.trackers.tracker import START, Place, RunFacts


class CsvFile:
    """Writes metrics.csv; see `Tracker`.

    Args:
    """

    flush_s = 1.0

    def __init__(self, facts: RunFacts) -> None:
        self._path = facts.folder / "metrics.csv"
        self._columns: list[str] = []
        self._rows: list[dict[str, Any]] = []  # not in the file

    def start(self) -> Place:
        """All lines once more, for a new file."""
        return START

    def line(self, step: int, figures: dict[str, float]) -> None:
        """One row."""
        self._rows.append({"step": step, **figures})

    def go_back(self, place: Place) -> Place:
        """The rows from a step on are removed."""
        rows = [row for row in self._all_rows() if int(row["step"]) < place.step]
        self._columns = []
        self._rows = rows
        self.flush(place)
        return Place(place.step, 0)

    def _all_rows(self) -> list[dict[str, Any]]:
        if not self._columns:
            return self._rows
        with self._path.open(encoding="utf-8", newline="") as file:
            return [*csv.DictReader(file), *self._rows]

    def flush(self, sent: Place) -> None:
        """Append the new rows, or write a new file."""
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
