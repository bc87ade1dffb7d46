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
_KERNEL_ASKED = ("", "worker", "data", "python", "evaluation")


class Seen(NamedTuple):
    """What a look has found: see `Activity`, `waits_for`."""

    phase: str
    kind: str
    waits: str
    place: Place | None


class StackSampler(threading.Thread):
    """Counts seconds by what a thread does meanwhile.

    Args:
        threads: those to look at, asked anew at each look: by name, Python's and the kernel's number.
        is_on: whether seconds count now.
        evaluates: whether it is an evaluation that goes on, whatever the stack says.
    """

    def __init__(
        self,
        threads: Callable[[], Mapping[str, tuple[int, int]]],
        is_on: Callable[[], bool] = lambda: True,
        evaluates: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name=OWN_THREADS, daemon=True)
        self.seconds: dict[tuple[str, Seen], float] = defaultdict(float)
        """By thread and activity; what a look finds counts for the time since the look before."""
        self._threads, self._is_on, self._evaluates = threads, is_on, evaluates
        self._runs = threading.Lock()  # held until the end: to wait for it costs less than an Event
        self._runs.acquire()

    def run(self) -> None:
        """Look until `stop`."""
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

    def _look(self, seconds: float) -> None:
        for name, (python_id, kernel_id) in self._threads().items():
            activity = _activity_in(python_id)
            if activity is None:
                continue
            phase, kind, place = activity
            if phase not in ("checkpoint", "compile") and self._evaluates():
                phase = "evaluation"
            waits = waits_for(kernel_id) if phase in _KERNEL_ASKED else ""
            self.seconds[name, Seen(phase, kind, waits, place)] += seconds


def _activity_in(thread: int) -> Activity | None:
    # The frames of all threads, this one among them, are never bound to a name: they would be a cycle, and
    # to collect one ends a process by SIGSEGV (Python 3.11).
    frame = sys._current_frames().get(thread)
    return None if frame is None else activity_of(frame)
