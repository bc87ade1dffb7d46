"""A thread that samples the stacks of others every few milliseconds, at a cost independent of their speed."""

import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flambeau.tune.watch.stack_phases import CodeLocation, activity_of
from flambeau.tune.watch.thread_state import WATCH_THREADS, waits_for

INTERVAL_S = 0.020
"""Between two samples, on average: a fixed interval might coincide with steps of that length; chosen."""
KERNEL_STATE_PHASES = "", "worker", "data", "python", "evaluation"
"""Phases in which it matters what a thread sleeps for."""
_SWITCH_S = 0.0005  # switch interval of Python while sampling; chosen

Threads = Callable[[], Mapping[str, tuple[int, int]]]
"""Threads to sample, called for each sample: by name, Python's and the kernel's number."""
Predicate = Callable[[], bool]


class StackSample(NamedTuple):
    """What a sample shows: see `Activity`, `waits_for`."""

    phase: str
    kind: str
    waits: str
    location: CodeLocation | None


class StackSampler(threading.Thread):
    """Counts seconds by what threads do, while `is_on`.

    `evaluates` says whether an evaluation runs, whatever the stack shows.
    """

    def __init__(
        self,
        threads: Threads,
        is_on: Predicate = lambda: True,
        evaluates: Predicate = lambda: False,
    ) -> None:
        super().__init__(name=WATCH_THREADS, daemon=True)
        self.seconds: dict[tuple[str, StackSample], float] = defaultdict(float)
        """By thread and activity; a sample counts for the time since the sample before."""
        self._threads, self._is_on, self._evaluates = threads, is_on, evaluates
        self._runs = (
            threading.Lock()
        )  # held until the end: waiting for it costs less than for an Event
        self._runs.acquire()
        self._switched = sys.getswitchinterval()

    def run(self) -> None:
        sys.setswitchinterval(min(self._switched, _SWITCH_S))
        draw = random.Random(0)
        last = time.perf_counter()
        while not self._runs.acquire(timeout=INTERVAL_S * (0.5 + draw.random())):
            now = time.perf_counter()
            if self._is_on():
                self._sample(now - last)
            last = now

    def stop(self) -> None:
        self._runs.release()
        self.join(1.0)
        sys.setswitchinterval(self._switched)

    def _sample(self, seconds: float) -> None:
        for name, numbers in self._threads().items():
            if (sample := sample_thread(*numbers, self._evaluates())) is not None:
                self.seconds[name, sample] += seconds


def sample_thread(thread: int, kernel_id: int, evaluates: bool) -> StackSample | None:
    """What another thread does, by its numbers in Python and in the kernel; None if it has ended."""
    # The dict of all frames, this one among them, is never bound to a name: that would be a cycle, and
    # collecting one ends a process by SIGSEGV (Python 3.11).
    frame = sys._current_frames().get(thread)
    if frame is None:
        return None
    activity = activity_of(frame)
    phase = phase_of(activity.phase, evaluates)
    waits = waits_for(kernel_id) if phase in KERNEL_STATE_PHASES else ""
    return StackSample(phase, activity.kind, waits, activity.location)


def phase_of(phase: str, evaluates: bool) -> str:
    """The phase that a stack shows, or evaluation if the loaders say so."""
    return "evaluation" if evaluates and phase not in ("checkpoint", "compile") else phase
