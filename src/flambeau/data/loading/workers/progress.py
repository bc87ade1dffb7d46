"""What each data worker reads at this moment, as seen by the process that waits for it."""

import contextlib
import itertools
import multiprocessing
import os
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NamedTuple

_THREADS = 16  # threads of a worker that are distinguished
_REASON_BYTES = 500
_FIELDS = 3  # index, whether it has been read, time of the last change
_slots = threading.local()
_next_slot = itertools.count()
_tables: "weakref.WeakSet[InFlight]" = weakref.WeakSet()


class Reading(NamedTuple):
    """A sample in a worker; `seconds` of reading, or since its end."""

    worker: int
    pid: int
    sample: int
    seconds: float
    is_over: bool


DEATH = re.compile(r"DataLoader worker \(pid(?:\(s\))? (\d+)[\d, ]*\) (.*?)(?:\. |\.?$)")
"""Torch's message about a worker that has died: its process, and how."""


class InFlight:
    """A table in shared memory that workers write without a lock: each thread has a cell."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pids = multiprocessing.RawArray("q", workers)
        self._reasons = multiprocessing.RawArray("c", workers * _REASON_BYTES)
        self.deaths: dict[int, str] = {}
        _tables.add(self)
        # Doubles hold an index to 2**53.
        self._cells = multiprocessing.RawArray("d", workers * _THREADS * _FIELDS)

    def begin(self, worker: int) -> None:
        """Called in a worker: from now on `reading` writes to this table."""
        global _table  # noqa: PLW0603 - a worker has one table, and datasets must not know of it
        self._pids[worker] = os.getpid()
        _table = self, worker

    def note(self, worker: int, slot: int, index: int, *, is_over: bool) -> None:
        """Record that a sample is being read, or that it has been."""
        at = (worker * _THREADS + slot % _THREADS) * _FIELDS
        # CLOCK_MONOTONIC is the same for all processes of a machine.
        self._cells[at + 2] = time.monotonic()
        self._cells[at], self._cells[at + 1] = index, is_over

    def note_reason(self, worker: int, text: str) -> None:
        """Record why a worker ends."""
        at = worker * _REASON_BYTES
        self._reasons[at : at + _REASON_BYTES] = text.encode()[:_REASON_BYTES].ljust(
            _REASON_BYTES, b"\0"
        )

    def reason(self, worker: int | None) -> str:
        """What a worker has recorded of its end; empty without it."""
        at = (worker or 0) * _REASON_BYTES
        found = bytes(self._reasons[at : at + _REASON_BYTES]).rstrip(b"\0")
        return "" if worker is None else found.decode(errors="replace")

    def worker_of(self, pid: int) -> int | None:
        pids = list(self._pids)
        return pids.index(pid) if pid in pids else None

    def kill(self) -> None:
        pids = set(self._pids)
        for child in multiprocessing.active_children():
            if child.pid in pids:
                child.kill()

    def last(self, worker: int | None = None) -> Reading | None:
        """The sample that has been read for longest, or else was read last."""
        now = time.monotonic()
        samples = []
        for number in range(self._workers) if worker is None else (worker,):
            for slot in range(_THREADS):
                at = (number * _THREADS + slot) * _FIELDS
                index, is_over, since = self._cells[at : at + _FIELDS]
                if since:
                    pid = self._pids[number]
                    samples.append(Reading(number, pid, int(index), now - since, bool(is_over)))
        unfinished = [sample for sample in samples if not sample.is_over]
        if unfinished:
            return max(unfinished, key=lambda sample: sample.seconds)
        return min(samples, key=lambda sample: sample.seconds, default=None)


_table: tuple[InFlight, int] | None = None


@contextlib.contextmanager
def reading(index: int) -> Iterator[None]:
    """While a data worker reads a sample, let the parent process see which one."""
    if _table is None:
        yield
        return
    table, worker = _table
    slot = getattr(_slots, "number", None)
    if slot is None:
        slot = _slots.number = next(_next_slot)
    table.note(worker, slot, index, is_over=False)
    try:
        yield
    finally:
        table.note(worker, slot, index, is_over=True)


def defer_worker_deaths() -> None:
    """Report a worker's death where its batch is awaited; call it after torch's handler is set.

    Torch's handler of SIGCHLD raises in the middle of a step.
    """
    if not hasattr(signal, "SIGCHLD") or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGCHLD)
    if callable(handler) and not isinstance(handler, _DeferringHandler):
        signal.signal(signal.SIGCHLD, _DeferringHandler(handler))


class _DeferringHandler:
    """Calls another handler and suppresses what it reports about our workers."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._handler(number, frame)
        except RuntimeError as error:
            death = DEATH.match(str(error))
            tables = [b for b in _tables if death and b.worker_of(int(death[1])) is not None]
            if death is None or not tables:
                raise
            tables[0].deaths[int(death[1])] = death[2]
