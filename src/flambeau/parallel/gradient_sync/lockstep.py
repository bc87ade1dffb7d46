"""Functions that wait for each other: each in its own thread, of which one runs at a time, in fixed order.

Threads, because they wait in the middle of a forward or backward pass. Whoever runs finds gradients, buffers
and generators as it left them, as in a process of its own.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from flambeau.errors import InputError

Keep = Callable[[], Callable[[], None]]
"""Saves and clears state that belongs to the running function; returns what restores it."""


class UnevenMeetings(InputError):
    """Some functions of a round have met more often than others."""


class _Stopped(BaseException):
    """Another function of the round has failed, so this one must end."""


class _Turn:
    """One function of a round, which runs when it may `go`."""

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)
        self.future: Future[None] | None = None
        self.has_ended = False


class Lockstep:
    """Runs at most `most` functions at a time that meet on their way; `uneven`: the message if not equally
    often.

    `keeps` save and restore what each function needs for itself.
    """

    def __init__(self, device: torch.device, *, most: int, uneven: str) -> None:
        self.keeps: list[Keep] = []
        self._device, self._most, self._uneven = device, most, uneven
        # Kept from round to round, because OpenMP makes threads for each of them.
        self._pool: ThreadPoolExecutor | None = None
        self._begin_round()

    def _begin_round(self) -> None:
        # The last function of a round runs in the thread that calls.
        self._turns = list[_Turn]()
        self._last = _Turn()
        self._current: _Turn | None = None
        self._given: list[Tensor] = []
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        return self._current is not None

    def do(self, work: Callable[[], None], *, is_last: bool) -> None:
        """Run a round's function until it meets the others; the last ends with all."""
        try:
            if is_last:
                self._current = self._last
                with _alone():
                    work()
                if not all(turn.has_ended for turn in self._turns):
                    raise UnevenMeetings(self._uneven)
                self._begin_round()
            else:
                self._turns.append(turn := _Turn())
                turn.future = self._started().submit(self._run, turn, work)
                self._wait_for(self._last)
                self._current = None
        except BaseException as error:
            failed = self._stop(error)
            if failed is error:
                raise
            raise failed from None

    def meet(self, given: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> Tensor:
        """Called by each function: `combine` of their tensors, of one shape and dtype, in their order."""
        turn = self._current
        assert turn is not None
        self._given.append(given)
        if turn is self._last:
            shapes = {(tensor.shape, tensor.dtype) for tensor in self._given}
            if len(self._given) != len(self._turns) + 1 or len(shapes) > 1:
                raise UnevenMeetings(self._uneven)
            self._combined = combine(self._given)
            self._given = []
        if self._turns:
            put_back = [keep() for keep in self.keeps]
            self._after(turn).go.release()
            self._wait_for(turn)
            for put in put_back:
                put()
        return self._combined

    def close(self) -> None:
        """End waiting functions and all threads; more rounds may follow."""
        self._stop(_Stopped())
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _started(self) -> ThreadPoolExecutor:
        if self._pool is None:
            prepare = functools.partial(_prepare_thread, self._device, torch.get_num_threads())
            self._pool = ThreadPoolExecutor(self._most, "flambeau-part", initializer=prepare)
        return self._pool

    def _run(self, turn: _Turn, work: Callable[[], None]) -> None:
        self._current = turn
        try:
            with _alone():
                work()
        except _Stopped:
            pass
        except BaseException as error:
            self._error = self._error or error
        turn.has_ended = True
        (self._after(turn) if self._error is None else self._last).go.release()

    def _after(self, turn: _Turn) -> _Turn:
        ring = [*self._turns, self._last]
        return ring[(ring.index(turn) + 1) % len(ring)]

    def _wait_for(self, turn: _Turn) -> None:
        turn.go.acquire()
        if self._error is not None:
            raise _Stopped
        self._current = turn

    def _stop(self, error: BaseException) -> BaseException:
        """End all functions of the round; returns the error of the first that failed."""
        self._error = failed = self._error or error
        for turn in self._turns:
            turn.go.release()
        wait([turn.future for turn in self._turns if turn.future is not None])
        self._begin_round()
        return failed


def _prepare_thread(device: torch.device, num_threads: int) -> None:
    """Both settings belong to a thread; the number of threads affects the bits."""
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Share no autograd thread or cache with another function."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
