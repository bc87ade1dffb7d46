"""events.jsonl: what happened to a run and when: starts, resumes, signals, lost workers, rollbacks."""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from flambeau.run.folder.json_file import json_row

_TAIL_BYTES = 2**16  # of metrics.jsonl: some hundred lines
_MAX_BYTES = 2**22  # of the file; later events are only printed


class EventsLog:
    """Appends a line per event; an event that cannot be written is dropped."""

    def __init__(
        self, path: Path, step: Callable[[], int], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._step, self._clock = path, step, clock

    def add(self, text: str, **figures: float) -> None:
        """Write an event: a text for people, and numbers that belong to it."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))
        line = {"time": now, "step": self._step(), "text": text[:2000], **figures}
        with contextlib.suppress(OSError), open(self._path, "ab", opener=_no_link) as file:
            if file.tell() < _MAX_BYTES:
                file.write(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")


def _no_link(path: str, flags: int) -> int:
    """Opens no link, which a run folder from elsewhere may hold in place of the file."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def note_lost_rank(run: Path, line: str) -> None:
    """Log, from outside of the run, how one of its processes was lost."""
    EventsLog(run / "events.jsonl", lambda: _logged_step(run / "metrics.jsonl")).add(
        f"lost: {line}"
    )


def _logged_step(metrics: Path) -> int:
    """The step of the last line of metrics.jsonl; 0 without one."""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        for line in reversed(file.read(_TAIL_BYTES).splitlines()):
            row = json_row(line)
            if row is not None and type(row.get("step")) is int:
                return int(row["step"])
    return 0
