"""The interface of a tracker: it gets the lines of metrics.jsonl in order, and may have to rewind."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flambeau.run.folder.json_file import json_file


class Position(NamedTuple):
    """A position in metrics.jsonl: after the lines before `step` and its first `lines`."""

    step: int
    lines: int


START = Position(0, 0)


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker knows about its run; `say` takes a line for the user, from any thread."""

    folder: Path
    config: Mapping[str, Any]
    metrics: Path
    size: int
    say: Callable[[str], None]

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def record(self, name: str) -> dict[str, Any]:
        """What a tracker has recorded about itself; empty if unreadable."""
        with contextlib.suppress(OSError, ValueError):
            values = json_file(self._record_file(name))
            if isinstance(values, dict):
                return values
        return {}

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Record something for the next start; if a power failure loses it, lines are sent again."""
        path = self._record_file(name)
        path.parent.mkdir(exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps(values) + "\n", encoding="utf-8")
        new.replace(path)

    def _record_file(self, name: str) -> Path:
        return self.folder / "trackers" / f"{name}.json"


class Tracker(Protocol):
    """Made in the training thread, where it imports its package; called in its own thread.

    An exception that it raises switches it off.

    Attributes:
        flush_s: seconds after a line until `flush`.
    """

    flush_s: float

    def start(self) -> Position:
        """Start or continue; returns the position up to which it needs no lines."""

    def line(self, step: int, figures: dict[str, float]) -> None:
        """Take a line; lists come as name/0, name/1 ...; numbers that are not finite are left out."""

    def rewind(self, position: Position) -> Position:
        """The run continues from an earlier position; returns that from which it needs lines again.

        That is `position`, or `Position(position.step, 0)`.
        """

    def flush(self, sent: Position) -> None:
        """Make what was sent survive the process, and record its position."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The process leaves the run; `result` is what a finished run has published."""


def stored_position(record: Mapping[str, Any]) -> Position:
    """The position that a tracker has recorded; the start if there is none."""
    values = record.get("step"), record.get("lines", 0)
    if all(type(value) is int and 0 <= value < 2**62 for value in values):
        return Position(*values)  # type: ignore[arg-type]
    return START


def flat(config: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """A configuration without nested tables: their values as table.name, lists as text."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            values |= flat(value, prefix=f"{prefix}{name}.")
        else:
            is_plain = isinstance(value, (bool, int, float, str))
            values[f"{prefix}{name}"] = value if is_plain else str(value)
    return values
