"""A thread that looks every few milliseconds at what others do: its cost does not depend on their speed."""

import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flambeau.tune.watch.stack_phases import Activity, Place, activity_of
from flambeau.tune.watch.thread_state import OWN_THREADS, waits_for

INTERVAL_S = 0.020
"""Between two looks, on average: a fixed time might fall in with steps of that length; chosen."""
KERNEL_ASKED = "", "worker", "data", "python", "evaluation"
"""Phases in which it counts what a thread sleeps for."""
_SWITCH_S = 0.0005  # after which Python gives way to a thread that looks; chosen

Threads = Callable[[], Mapping[str, tuple[int, int]]]
"""Those to look at, asked anew at each look: by name, Python's and the kernel's number."""
Truth = Callable[[], bool]


class Seen(NamedTuple):
    """What a look has found: see `Activity`, `waits_for`."""

    phase: str
    kind: str
    waits: str
    place: Place | None


class StackSampler(threading.Thread):
    """Counts seconds by what a thread does meanwhile.

    Args:
        threads: those to look at.
        is_on: whether seconds count now.
        evaluates: whether it is an evaluation that goes on, whatever the stack says.
    """

    def __init__(
        self, threads: Threads, is_on: Truth = lambda: True, evaluates: Truth = lambda: False
    ) -> None:
        super().__init__(name=OWN_THREADS, daemon=True)
        self.seconds: dict[tuple[str, Seen], float] = defaultdict(float)
        """By thread and activity; what a look finds counts for the time since the look before."""
        self._threads, self._is_on, self._evaluates = threads, is_on, evaluates
        self._runs = threading.Lock()  # held until the end: to wait for it costs less than an Event
        self._runs.acquire()
        self._switched = sys.getswitchinterval()

    def run(self) -> None:
        """Look until `stop`."""
        sys.setswitchinterval(min(self._switched, _SWITCH_S))
        draw = random.Random(0)
        last = time.perf_counter()
        while not self._runs.acquire(timeout=INTERVAL_S * (0.5 + draw.random())):
            now = time.perf_counter()
            if self._is_on():
                self._look(now - last)
            last = now

    def stop(self) -> None:
        """No look begins any more."""
        self._runs.release()
        self.join(1.0)
        sys.setswitchinterval(self._switched)

    def _look(self, seconds: float) -> None:
        for name, numbers in self._threads().items():
            if (seen := look_at(*numbers, self._evaluates())) is not None:
                self.seconds[name, seen] += seconds


def look_at(thread: int, kernel_id: int, evaluates: bool) -> Seen | None:
    """What another thread does; None if it has ended.

    Args:
        thread: Python's number of it.
        kernel_id: the kernel's.
        evaluates: an evaluation goes on, whatever the stack says.
    """
    activity = _activity_in(thread)
    if activity is None:
        return None
    phase = phase_of(activity.phase, evaluates)
    waits = waits_for(kernel_id) if phase in KERNEL_ASKED else ""
    return Seen(phase, activity.kind, waits, activity.place)


def phase_of(phase: str, evaluates: bool) -> str:
    """The phase that a stack tells, or evaluation where the loaders tell that."""
    return "evaluation" if evaluates and phase not in ("checkpoint", "compile") else phase


def _activity_in(thread: int) -> Activity | None:
    # The frames of all threads, this one among them, are never bound to a name: they would be a cycle, and
    # to collect one ends a process by SIGSEGV (Python 3.11).
    frame = sys._current_frames().get(thread)
    return None if frame is None else activity_of(frame)
