"""What a tracker is: it gets the lines of metrics.jsonl in their order, and may have to go back."""

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flambeau.run.folder.json_file import json_file


class Place(NamedTuple):
    """How far in metrics.jsonl: all lines before `step`, and the first `lines` of that step."""

    step: int
    lines: int


START = Place(0, 0)


@dataclass(frozen=True)
class RunFacts:
    """What a tracker knows about its run.

    Attributes:
        config: what config.toml holds.
        metrics: the file metrics.jsonl.
        size: how much of it there is at the start, in bytes.
        say: takes a line for the user, from any thread.
    """

    folder: Path
    config: Mapping[str, Any]
    metrics: Path
    size: int
    say: Callable[[str], None]

    @property
    def name(self) -> str:
        """What to call the run."""
        return self.folder.resolve().name

    def record(self, name: str) -> dict[str, Any]:
        """What a tracker has noted about itself; nothing where that cannot be read."""
        with contextlib.suppress(OSError, ValueError):
            found = json_file(self._record_file(name))
            if isinstance(found, dict):
                return found
        return {}

    def note(self, name: str, values: Mapping[str, Any]) -> None:
        """Note something for the next start; lost in a power cut, after which more is sent again."""
        path = self._record_file(name)
        path.parent.mkdir(exist_ok=True)
        new = path.with_name(f".{path.name}.new")
        new.write_text(json.dumps(values) + "\n", encoding="utf-8")
        new.replace(path)

    def _record_file(self, name: str) -> Path:
        return self.folder / "trackers" / f"{name}.json"


class Tracker(Protocol):
    """Is made in the training thread, where it imports its package; the rest is called in its own thread.

    Whatever it raises switches it off.

    Attributes:
        flush_s: seconds after which what it got is flushed.
    """

    flush_s: float

    def start(self) -> Place:
        """Begin, or go on; returns up to where it needs no line any more."""

    def line(self, step: int, figures: dict[str, float]) -> None:
        """A line, its lists as name/0, name/1 ...; numbers that are not finite are left out."""

    def go_back(self, place: Place) -> Place:
        """The run continues from an earlier place; returns from where on it needs all lines again.

        That is `place`, or `Place(place.step, 0)`.
        """

    def flush(self, sent: Place) -> None:
        """Make sure that what was sent survives the process, and note how far that is."""

    def end(self, result: Mapping[str, Any] | None) -> None:
        """The process leaves the run; `result` is what a finished one has published, by name."""


def stored_place(record: Mapping[str, Any]) -> Place:
    """Where a tracker has noted to be; the start if it has noted nothing of the kind."""
    values = record.get("step"), record.get("lines", 0)
    if all(type(value) is int and 0 <= value < 2**62 for value in values):
        return Place(*values)  # type: ignore[arg-type]
    return START


def flat(config: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    """A configuration without tables: those within it as table.name, lists as text."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= flat(value, prefix=f"{prefix}{name}.")
        else:
            is_plain = isinstance(value, (bool, int, float, str))
            found[f"{prefix}{name}"] = value if is_plain else str(value)
    return found
