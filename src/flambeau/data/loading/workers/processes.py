"""Worker processes of a loader: how they handle signals, and which of them has lost a batch."""

import contextlib
import ctypes
import functools
import math
import multiprocessing
import multiprocessing.queues
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
from flambeau.errors import InputError, WorkerLost, shortage
from flambeau.terminal import say

_GROUP_SIGNALS = {
    getattr(signal, name)
    for name in ("SIGTERM", "SIGUSR1", "SIGXCPU", "SIGINT")
    if hasattr(signal, name)
}
MOST_WORKERS = 1024  # no machine has as many cores, and a million would bring it to a halt
_GRACE_S = 30  # how long a worker survives a SIGTERM sent to the whole group; chosen, untested
_CHECK_S = 2  # between two checks of the workers while waiting for a batch


@dataclass
class Restarts:
    """How often lost workers may still be replaced, in all loaders of a run together."""

    left: int = 0
    say: Callable[[str], None] = say

    def take(self, error: WorkerLost) -> None:
        """Use one up, or raise the error if none is left."""
        if not self.left:
            raise error
        self.left -= 1
        what = str(error).splitlines()[0]
        self.say(f"{what}: the workers are started again ({self.left} more times if need be)")


class Workers:
    """The workers of a DataLoader; one stalls after `stall_timeout` seconds with a sample; 0 is never."""

    def __init__(self, count: int, *, stall_timeout: float, describe: Callable[[int], str]) -> None:
        if count > MOST_WORKERS:
            raise InputError(
                f"workers must be at most {MOST_WORKERS}, got {count}: each is a process"
            )
        self.count, self._stall_timeout, self._describe = count, stall_timeout, describe
        self._in_flight = InFlight(count)
        self._waiting_since = math.inf  # infinite while nothing waits for a batch
        self._stalled: WorkerLost | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of DataLoader; read them in the thread that starts the workers."""
        # Linux notifies a process of the end of the thread that started it, not of the parent process.
        lasts = threading.current_thread() is threading.main_thread()
        start = functools.partial(_start, self._in_flight, lasts)
        timeout = {"timeout": _CHECK_S} if self.count else {}
        return {"num_workers": self.count, "worker_init_fn": start, **timeout}

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of the workers: InputError where a limit of the system forbids it."""
        before = multiprocessing.active_children()
        try:
            yield
        except (OSError, RuntimeError, MemoryError) as error:
            lacking = shortage(error)
            if not self.count or lacking is None:
                raise
            for child in multiprocessing.active_children():
                if child not in before:
                    child.kill()
            # Torch's iterator, which is made by half, fails as it is freed.
            hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
            try:
                _clear_frames(error)
            finally:
                sys.unraisablehook = hook
            raise InputError(f"{self.count} data workers cannot be started: {lacking}") from error

    def watched(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a DataLoader; if one does not arrive, its worker is named."""
        self._waiting_since = time.monotonic()
        ended = threading.Event()
        if self.count and self._stall_timeout:
            # A weak reference: the last strong one ends the workers.
            arguments = weakref.ref(batches), ended
            threading.Thread(target=self._kill_stalled, args=arguments, daemon=True).start()
        try:
            while True:
                try:
                    item = next(batches)
                except StopIteration:
                    return
                except (ConnectionError, EOFError, FileNotFoundError) as error:
                    # From torch's transport, if a worker dies while its batch is fetched: the next check
                    # finds it dead. Those of a dataset are 'Caught ... in DataLoader worker process'.
                    if not self.count or str(error).startswith("Caught "):
                        raise
                    if self._stalled is not None:
                        raise self._stalled from None
                except RuntimeError as error:
                    if not self.count:
                        raise
                    self._judge(error, time.monotonic() - self._waiting_since)
                else:
                    self._waiting_since = math.inf
                    yield item
                    self._waiting_since = time.monotonic()
        except (Exception, KeyboardInterrupt) as error:
            if self.count:
                self._kill(batches)  # torch would wait for those that are still reading
                _clear_frames(error)
            raise
        finally:
            ended.set()
            del batches  # a traceback that holds this frame would keep the workers

    def _kill_stalled(self, batches: "weakref.ref[Iterator[Any]]", ended: threading.Event) -> None:
        """Kill workers for which torch waits beyond its timeout.

        If a worker sends a batch and is stopped then, torch waits for its memory without a limit.
        """
        while not ended.wait(_CHECK_S):
            waited = time.monotonic() - self._waiting_since
            if waited > self._stall_timeout + 2 * _CHECK_S:
                self._stalled = self._stall(waited)
                if self._stalled is not None:
                    self._kill(batches())
                    return

    def _judge(self, error: RuntimeError, waited: float) -> None:
        """Raise WorkerLost, or an error of the dataset itself; return to wait longer."""
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
        worker = self._in_flight.worker_of(pid)
        named = self._named(self._in_flight.last(worker))
        if reason := self._in_flight.reason(worker):
            raise WorkerLost(f"{named} and could not hand over a batch: {reason}") from None
        raise WorkerLost(
            f"{named} and {how}\nA kernel without memory kills workers: try fewer of them"
        ) from None

    def _stall(self, waited: float) -> WorkerLost | None:
        """The error for a sample that has been read for too long; None if there is none."""
        last = self._in_flight.last()
        stalled_s = waited if last is None else min(waited, last.seconds)
        if not self._stall_timeout or stalled_s < self._stall_timeout:
            return None
        return WorkerLost(
            f"{self._named(last)} for {stalled_s:.0f} s\n"
            "See what blocks it there, or allow more time with stall_timeout"
        )

    def _kill(self, batches: Iterator[Any] | None) -> None:
        """Kill the workers, but not while one holds the lock that torch takes when its iterator ends."""
        lock = getattr(getattr(batches, "_workers_done_event", None), "_cond", threading.Lock())
        taken = lock.acquire(timeout=1)
        self._in_flight.kill()
        if taken:
            lock.release()

    def _named(self, last: Reading | None) -> str:
        if last is None:
            return "a data worker has read nothing"
        what = "has read nothing after" if last.is_over else "has been reading"
        where = self._describe(last.sample)
        return f"data worker {last.worker} (process {last.pid}) {what} {where}"


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames of an error's traceback, and of the errors before it.

    Torch's frames would keep its iterator alive until the garbage collector runs: perhaps in a worker that is
    forked later, or when nobody knows any more that the dead workers belonged to this loader.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


@contextlib.contextmanager
def preserve_errors(what: str, num_workers: int) -> Iterator[None]:
    """Wrap errors that would otherwise get lost.

    StopIteration would end an epoch silently; what cannot be pickled never leaves its worker.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, StopIteration) and (not num_workers or _is_pickled(type(error))):
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
def block_signals() -> Iterator[None]:
    """Block signals: without handlers yet a worker would die of one."""
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

    Schedulers and terminals signal the whole process group; the parent needs its workers to end the step.
    """
    in_flight.begin(worker)
    _end_if_nothing_is_sent(in_flight, worker)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_S) and None)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _GROUP_SIGNALS)
    if sys.platform == "linux" and starter_lasts:
        death_signal = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(death_signal, signal.SIGKILL, 0, 0, 0)
    # A child of a fork server, or of a thread that ends, gets no signal when its parent dies; nor does one
    # whose parent died before this line. Torch's own check would watch the server or init instead.
    parent = multiprocessing.parent_process()
    if parent is not None and (os.getppid() != parent.pid or not starter_lasts):
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


def _end_if_nothing_is_sent(in_flight: InFlight, worker: int) -> None:
    """End a worker that cannot hand over a batch, for which its parent would wait for ever.

    Python's threads for that print why, and go on; that of `multiprocessing.resource_sharer` without a pause.
    """

    def end(error: BaseException) -> None:
        in_flight.note_reason(worker, shortage(error) or f"{type(error).__name__}: {error}")
        os._exit(1)

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if shortage(error) is not None:
            end(error)
        if not isinstance(error, ConnectionError):  # the parent has given up, and says why
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
    # A name of Python's own that is not public: without it there is a traceback, and the stall is found.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(  # type: ignore[attr-defined]
        lambda error, _: end(error)
    )


def _exit_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
