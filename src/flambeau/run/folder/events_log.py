"""events.jsonl: what happened to a run and when: starts, resumes, signals, lost workers, steps taken back."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from flambeau.run.folder.json_file import json_row

_TAIL_BYTES = 2**16  # of metrics.jsonl: some hundred lines
_MOST_BYTES = 2**22  # of the file; what a run adds beyond that is on its terminal alone


class EventsLog:
    """Appends a line for each event; one that cannot be written is left out.

    Args:
        path: of the file.
        step: gives the optimizer steps done.
        clock: seconds since 1970.
    """

    def __init__(
        self, path: Path, step: Callable[[], int], *, clock: Callable[[], float] = time.time
    ) -> None:
        self._path, self._step, self._clock = path, step, clock

    def add(self, text: str, **figures: float) -> None:
        """Write a line.

        Args:
            text: what happened, for people.
            figures: that belong to it.
        """
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._clock()))
        line = {"time": now, "step": self._step(), "text": text[:2000], **figures}
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            if file.tell() < _MOST_BYTES:
                file.write(json.dumps(line, ensure_ascii=False).encode(errors="replace") + b"\n")


def note_loss(run: Path, line: str) -> None:
    """Note in the folder of a run, from outside of it, how one of its processes was lost.

    Args:
        run: the folder.
        line: says which process, where and how.
    """
    EventsLog(run / "events.jsonl", lambda: _logged_step(run / "metrics.jsonl")).add(
        f"lost: {line}"
    )


def _logged_step(metrics: Path) -> int:
    """The step of the last line of metrics.jsonl; 0 where there is none."""
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        for line in reversed(file.read(_TAIL_BYTES).splitlines()):
            row = json_row(line)
            if row is not None and type(row.get("step")) is int:
                return int(row["step"])
    return 0
