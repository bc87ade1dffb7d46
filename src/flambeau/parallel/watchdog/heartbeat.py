"""The heartbeat that each rank writes, and how a stalled rank is found from all heartbeats."""

import contextlib
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

LEFT: Final = "left"
"""The phase of a rank whose run is over."""

SAVING: Final = "saving"
"""The phase in which ranks wait for the disk."""

_PATIENCE: Final = 10
"""Saving, and the first time of any phase (compilation, cudnn's search), may take so much longer. Chosen."""
_NUM_FRAMES: Final = 20


class Process(NamedTuple):
    """The process of a rank.

    Attributes:
        started: its start time in /proc, because process numbers are reused.
        pid_namespace: processes with the same one see each other in /proc; empty without /proc.
    """

    host: str
    pid: int
    started: str
    pid_namespace: str

    @classmethod
    def this(cls, host: str) -> "Process":
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            pid_namespace = f"{host} {boot} {Path('/proc/self/ns/pid').readlink()}"
            return cls(host, os.getpid(), state_and_start(os.getpid())[1], pid_namespace)
        return cls(host, os.getpid(), "", "")

    @property
    def is_gone(self) -> bool:
        """It has ended, even if its parent has not noticed yet; False where that cannot be read."""
        try:
            state, started = state_and_start(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # such as too many open files
            return False
        return state in "ZX" or started != self.started


def state_and_start(pid: int) -> tuple[str, str]:
    """State and start time: fields 3 and 22 of /proc/PID/stat, behind a name of any form."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


class Heartbeat(NamedTuple):
    """A heartbeat.

    Attributes:
        point: points of the run that the main thread has reached.
        beats: calls of `beat` since that point.
        is_overdue: that is longer than the phase may take.
    """

    number: int
    point: int
    beats: int
    phase: str
    stalled_s: float
    is_overdue: bool


Heartbeats = Sequence[Heartbeat | None]
"""Of all ranks; None for one that has not written any yet."""


class ProgressTracker:
    """The progress of the main thread: counted by itself, timed by another thread.

    Without it for `timeout_s` (0: forever) it has stalled; `update` is called every `tick_s`, unless the
    process was suspended.
    """

    def __init__(
        self, *, timeout_s: float, tick_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.timeout_s, self._tick_s, self._clock = timeout_s, tick_s, clock
        self._phase = "starting"
        self._count = 0
        self.point = 0
        self._known: set[str] = set()
        self._position: tuple[int, int, str] | None = None
        self._updated_at = self.stalled_s = 0.0
        self._number = 0

    def beat(self, phase: str) -> None:
        self._known.add(self._phase)
        self._phase = phase
        self._count += 1

    def reach_point(self) -> None:
        self._count = 0
        self.point += 1

    @property
    def allowed_s(self) -> float:
        """How long the main thread may take for this phase; 0: forever."""
        is_quick = self._phase in self._known and self._phase != SAVING
        return self.timeout_s * (1 if is_quick else _PATIENCE)

    def update(self) -> None:
        """Measure the time without progress; call it often. A suspended process counts as one tick."""
        now = self._clock()
        position = (self.point, self._count, self._phase)
        if position == self._position:
            self.stalled_s += min(now - self._updated_at, self._tick_s)
        else:
            self._position = position
            self.stalled_s = 0.0
        self._updated_at = now

    def heartbeat(self, *, has_left: bool = False) -> Heartbeat:
        self._number += 1
        is_overdue = self.timeout_s > 0 and self.stalled_s >= self.allowed_s
        phase = LEFT if has_left else self._phase
        return Heartbeat(self._number, self.point, self._count, phase, self.stalled_s, is_overdue)


def silent_ranks(before: Heartbeats, after: Heartbeats) -> list[int]:
    """Ranks that wrote nothing between two readings, without running threads or network."""
    return [
        rank
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
        if new is None or (old is not None and old.number == new.number and new.phase != LEFT)
    ]


def straggler_ranks(beats: Heartbeats) -> list[int]:
    """The ranks furthest behind, for which the others wait; none unless all of them are overdue."""
    running = {
        rank: beat for rank, beat in enumerate(beats) if beat is not None and beat.phase != LEFT
    }
    least = min(((beat.point, beat.beats) for beat in running.values()), default=None)
    last = [rank for rank, beat in running.items() if (beat.point, beat.beats) == least]
    return last if all(running[rank].is_overdue for rank in last) else []


def outlier_ranks(stacks: Mapping[int, str]) -> list[int]:
    """Among ranks of equal progress, the smallest group with one stack, perhaps all."""
    groups = defaultdict(list)
    for rank, stack in stacks.items():
        groups[stack].append(rank)
    return min(groups.values(), key=len)


def frames_of(thread: int) -> str:
    """The innermost frames of a thread, newest last, for `stack_text`."""
    frame: FrameType | None = sys._current_frames().get(thread)
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < _NUM_FRAMES:
        frames.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return json.dumps(frames[::-1])


def stack_text(frames: str) -> str:
    """The frames as in a traceback, with the source lines of this machine."""
    summary = [traceback.FrameSummary(*entry) for entry in json.loads(frames)]
    return "".join(traceback.format_list(summary)).rstrip()
