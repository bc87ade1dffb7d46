"""Worker processes of a loader: how they treat signals, and which of them has lost a batch."""

import contextlib
import ctypes
import functools
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flambeau.data.loading.workers.progress import DEATH, InFlight, Reading
from flambeau.errors import InputError, WorkerLost
from flambeau.terminal import say

_GROUP_SIGNALS = {
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
}
MOST_WORKERS = 1024  # no machine has as many cores, and a million would bring it to a halt
_GRACE_S = 30  # how long a worker outlives a SIGTERM sent to the whole group; chosen, untested
_CHECK_S = 2  # between two checks of workers that a batch is waited for


@dataclass
class Restarts:
    """How often lost workers may still be replaced, in all loaders of a run together.

    Attributes:
        left: how often.
        say: takes a line for the user.
    """

    left: int = 0
    say: Callable[[str], None] = say

    def take(self, error: WorkerLost) -> None:
        """Use one up; raises the error if there is none left."""
        if not self.left:
            raise error
        self.left -= 1
        what = str(error).splitlines()[0]
        self.say(f"{what}: the workers are started again ({self.left} more times if need be)")


class Workers:
    """The workers of a DataLoader, as many as `count`.

    Args:
        count: 0 reads in this process.
        stall_timeout: seconds after which a worker that reads the same sample counts as stalled; 0 is never.
        describe: what to call a sample.
    """

    def __init__(self, count: int, *, stall_timeout: float, describe: Callable[[int], str]) -> None:
        if count > MOST_WORKERS:
            raise InputError(
                f"workers must be at most {MOST_WORKERS}, got {count}: each is a process"
            )
        self.count, self._stall_timeout, self._describe = count, stall_timeout, describe
        self._in_flight = InFlight(count)
        self._asked = math.inf  # when the batch that is waited for was asked for
        self._stalled: WorkerLost | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of DataLoader; to be asked for in the thread that starts the workers."""
        # Linux notifies a process of the end of the thread that has started it, not of the parent's.
        lasts = threading.current_thread() is threading.main_thread()
        start = functools.partial(_start, self._in_flight, lasts)
        timeout = {"timeout": _CHECK_S} if self.count else {}
        return {"num_workers": self.count, "worker_init_fn": start, **timeout}

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """What DataLoader yields; a worker from which no batch arrives is named."""
        self._asked = time.monotonic()
        ended = threading.Event()
        if self.count and self._stall_timeout:
            # Not the iterator itself, whose last reference ends the workers.
            arguments = weakref.ref(batches), ended
            threading.Thread(target=self._end_stopped, args=arguments, daemon=True).start()
        try:
            while True:
                try:
                    item = next(batches)
                except StopIteration:
                    return
                except (ConnectionError, EOFError, FileNotFoundError) as error:
                    # Of torch's transport, where a worker dies while its batch is fetched from it: the next
                    # check finds it dead. Those of a dataset are 'Caught ... in DataLoader worker process'.
                    if not self.count or str(error).startswith("Caught "):
                        raise
                    if self._stalled is not None:
                        raise self._stalled from None
                except RuntimeError as error:
                    if not self.count:
                        raise
                    self._judge(error, time.monotonic() - self._asked)
                else:
                    self._asked = math.inf  # nothing is waited for
                    yield item
                    self._asked = time.monotonic()
        except (Exception, KeyboardInterrupt) as error:
            if self.count:
                self._kill(batches)  # torch would wait for those that still read
                _clear_frames(error)
            raise
        finally:
            ended.set()
            del batches  # a traceback that holds this frame would keep the workers

    def _end_stopped(self, batches: "weakref.ref[Iterator[Any]]", ended: threading.Event) -> None:
        """Kill workers that are waited for in spite of torch's timeout, which raises long before this does.

        Where a worker has sent a batch and is stopped then, torch waits without a limit for its memory.
        """
        while not ended.wait(_CHECK_S):
            waited = time.monotonic() - self._asked
            if waited > self._stall_timeout + 2 * _CHECK_S:
                self._stalled = self._stall(waited)
                if self._stalled is not None:
                    self._kill(batches())
                    return

    def _judge(self, error: RuntimeError, waited: float) -> None:
        """Raise WorkerLost, or an error of the dataset as it is; return to wait longer."""
        if self._stalled is not None:
            raise self._stalled from None
        if str(error).startswith("DataLoader timed out"):
            stalled = self._stall(waited)
            if stalled is None:
                return
            raise stalled from None
        ended = DEATH.match(str(error))
        if ended is None:
            raise error
        pid = int(ended[1])
        how = self._in_flight.deaths.get(pid, ended[2]).replace("is killed", "was killed")
        last = self._in_flight.last(self._in_flight.worker_of(pid))
        raise WorkerLost(
            f"{self._named(last)} and {how}\nA kernel without memory kills workers: try fewer of them"
        ) from None

    def _stall(self, waited: float) -> WorkerLost | None:
        """What to say where the sample that is read for the longest time is read for too long."""
        last = self._in_flight.last()
        stalled_s = waited if last is None else min(waited, last.seconds)
        if not self._stall_timeout or stalled_s < self._stall_timeout:
            return None
        return WorkerLost(
            f"{self._named(last)} for {stalled_s:.0f} s\n"
            "See what blocks it there, or allow more time with stall_timeout"
        )

    def _kill(self, batches: Iterator[Any] | None) -> None:
        """End the workers now; none while it holds the lock that torch takes when it ends its iterator."""
        lock = getattr(getattr(batches, "_workers_done_event", None), "_cond", threading.Lock())
        taken = lock.acquire(timeout=1)
        self._in_flight.kill()
        if taken:
            lock.release()

    def _named(self, last: Reading | None) -> str:
        """A worker and its sample."""
        if last is None:
            return "a data worker has read nothing"
        what = "has read nothing after" if last.is_over else "has been reading"
        where = self._describe(last.sample)
        return f"data worker {last.worker} (process {last.pid}) {what} {where}"


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback, and of those that it has replaced.

    Torch's frames would keep its iterator alive until the garbage collector runs: perhaps in a worker that is
    forked later, or when nothing knows any more that the dead workers were of this loader.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


@contextlib.contextmanager
def errors_kept(what: str, *, workers: int) -> Iterator[None]:
    """Wrap errors that would otherwise get lost.

    StopIteration would end an epoch silently, and an error that cannot be pickled does not get out of its
    worker.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, StopIteration) and (not workers or _is_pickled(type(error))):
            error.add_note(f"flambeau: this was {what}")
            raise
        # Not 'from error': contextlib would take the StopIteration for its own and raise it.
        raise RuntimeError(f"{what}: {type(error).__name__} {error}".rstrip())  # noqa: B904


def _is_pickled(kind: type) -> bool:
    try:
        pickle.dumps(kind)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Block signals: a worker that gets one before it has installed its handlers would die of it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(in_flight: InFlight, starter_lasts: bool, worker: int) -> None:
    """Make a worker end with its parent, and survive a signal that is meant for the parent.

    Schedulers and terminals signal the whole process group; the parent still needs its workers to end
    the step.
    """
    in_flight.begin(worker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S) and None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
    if sys.platform == "linux" and starter_lasts:
        death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL, 0, 0, 0)
    # A child of a fork server or of a thread that ends gets no signal when its parent dies, nor does one
    # whose parent died before this line; torch's own check would look at the server or at init instead.
    parent = multiprocessing.parent_process()
    if parent is not None and (os.getppid() != parent.pid or not starter_lasts):
        threading.Thread(target=_die_with, args=(parent,), daemon=True).start()


def _die_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
