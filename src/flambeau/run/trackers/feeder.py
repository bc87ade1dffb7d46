"""The thread that feeds one tracker from metrics.jsonl, so no line waits in memory or is dropped.

A slow or hanging tracker delays neither the run nor the others. When the run returns to a checkpoint it cuts
metrics.jsonl, and the thread rewinds too.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flambeau.run.trackers.line_reader import figures_of, next_lines, position_after
from flambeau.run.trackers.tracker import START, Position, TrackedRun, Tracker

_BATCH_S = 0.1  # lines within this time are sent together, with fewer thread switches; chosen
_QUIET_S = 2.0  # after `before_fork`: longer than many workers take to start; chosen
_MAX_WORK = 4  # copies of the weights that wait for a slow tracker; chosen


class Feeder:
    """Passes all lines to a tracker, in a thread that the run does not wait for."""

    def __init__(self, name: str, tracker: Tracker, facts: TrackedRun) -> None:
        self.name = name
        self._tracker = tracker
        self._path = facts.metrics
        self._say = facts.say
        # Set by the training thread.
        self._size = facts.size
        self._cut: int | None = None
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._more_work = deque[tuple[int, Callable[[], None]]]()
        self.num_left_out = 0
        """Number of `run_after` calls whose work was dropped."""
        self._quiet_until = 0.0
        self._hangs = False
        self._ending = threading.Event()
        self._is_abandoned = False
        self.has_ended = False
        """The tracker has taken all lines and its end."""
        self._result: Mapping[str, Any] | None = None
        # Set by the thread.
        self._busy = threading.Lock()  # held while the tracker works
        self._offset = 0
        self._at = START
        self._sent = START
        self._flush_at: float | None = None
        self._news.set()
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    # ---- the training thread

    def grow(self, size: int) -> None:
        self._size = size
        if not self._news.is_set():  # is_set needs no lock
            self._news.set()

    def cut(self, size: int, *, step: int) -> None:
        """The file was cut to the size that it had at the checkpoint of this step."""
        with self._lock:
            self._size = size
            self._cut = size if self._cut is None else min(size, self._cut)
            self._more_work = deque(work for work in self._more_work if work[0] < step)
        self._news.set()

    def run_after(self, step: int, work: Callable[[], None]) -> None:
        """Let the thread do this, after the lines up to a step; drops the oldest of too many."""
        with self._lock:
            if len(self._more_work) == _MAX_WORK:
                self._more_work.popleft()
                self.num_left_out += 1
            self._more_work.append((step, work))
        self._news.set()

    def before_fork(self, *, wait_s: float) -> None:
        """Keep the tracker idle for a moment, in which processes are forked.

        A child would inherit locks that another thread holds, import locks above all. A hanging tracker is
        waited for only once.
        """
        self._quiet_until = time.monotonic() + _QUIET_S
        if self._busy.acquire(timeout=0.0 if self._hangs else wait_s):
            self._busy.release()
        else:
            self._hangs = True

    def abandon(self) -> None:
        self._is_abandoned = True
        self._news.set()

    def end(self, result: Mapping[str, Any] | None) -> None:
        self._result = result
        self._ending.set()
        self._news.set()

    def wait(self, deadline: float) -> bool:
        """Whether the thread ends before the deadline, by time.monotonic(); otherwise it is abandoned."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._is_abandoned = self._thread.is_alive()
        return not self._is_abandoned

    # ---- the tracker's thread

    def _run(self) -> None:
        try:
            with self._at_work():
                self._sent = self._tracker.start()
            while not self._is_abandoned:
                self._news.wait(self._seconds_to_flush())
                self._ending.wait(_BATCH_S)
                self._news.clear()
                is_ending = self._ending.is_set()  # before reading: no line is written after it
                self._catch_up()
                if is_ending or self._seconds_to_flush() == 0:
                    self._flush()
                if is_ending:
                    with self._at_work():
                        self._tracker.end(self._result)
                    self.has_ended = True
                    return
        except _Abandoned:
            pass
        # Whatever a tracker raises, even sys.exit(), is reported and does not stop the run.
        except BaseException as error:
            text = " ".join(str(error).split())
            self._say(
                f"{self.name} gets no more lines, and the run goes on: {type(error).__name__}: {text:.300}"
            )

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """Around each piece of work; none starts while workers are forked, or after the run has left."""
        while True:
            self._busy.acquire()
            quiet_s = 0.0 if self._ending.is_set() else self._quiet_until - time.monotonic()
            if quiet_s <= 0 or self._is_abandoned:
                break
            self._busy.release()
            time.sleep(min(quiet_s, 0.1))
        try:
            if self._is_abandoned:
                raise _Abandoned
            yield
        finally:
            self._hangs = False
            self._busy.release()

    def _seconds_to_flush(self) -> float | None:
        return None if self._flush_at is None else max(0.0, self._flush_at - time.monotonic())

    def _flush(self) -> None:
        with self._at_work():
            self._tracker.flush(self._sent)
        self._flush_at = None

    def _catch_up(self) -> None:
        """Pass on all new lines, and do the waiting work."""
        self._rewind_if_cut()
        while lines := next_lines(self._path, self._offset, self._size):
            for end, row in lines:
                with self._at_work():
                    if self._cut is None:
                        self._pass_on(row)
                        self._offset = end
            self._rewind_if_cut()
        while self._more_work:
            with self._at_work():
                with self._lock:
                    work = self._more_work.popleft()[1] if self._more_work else None
                if work is not None:
                    work()

    def _pass_on(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        self._at = Position(step, self._at.lines + 1 if step == self._at.step else 1)
        if self._at <= self._sent:
            return
        self._tracker.line(step, figures_of(row))
        self._sent = self._at
        if self._flush_at is None:
            self._flush_at = time.monotonic() + self._tracker.flush_s

    def _rewind_if_cut(self) -> None:
        with self._lock:
            cut, self._cut = self._cut, None
        if cut is None or cut >= self._offset:
            return
        position, self._offset = position_after(self._path, cut)
        self._at = START
        with self._at_work():
            self._sent = self._tracker.rewind(position)


class _Abandoned(Exception):
    """The run has left: what the tracker did now could collide with the next start in the same folder."""
