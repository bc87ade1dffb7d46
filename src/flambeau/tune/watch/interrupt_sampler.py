"""Looks that the main thread takes itself, between two of its instructions, at the signals of a timer."""

import atexit
import ctypes
import random
import signal
import sys
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from types import FrameType

from flambeau.tune.watch.stack_phases import Activity, activity_of
from flambeau.tune.watch.stack_sampler import (
    INTERVAL_S,
    KERNEL_ASKED,
    Seen,
    StackSampler,
    Threads,
    Truth,
    look_at,
    phase_of,
)
from flambeau.tune.watch.thread_state import OWN_THREADS, waits_for

_FROM_END = 3  # of the real-time signals; who takes one takes the first or the last; chosen
_MONOTONIC, _TO_THREAD = 1, 4  # CLOCK_MONOTONIC, SIGEV_THREAD_ID of Linux
_IDLE = 0.25  # share of the time between two looks from which on the kernel is asked; chosen
_ASKED_FOR_S = 0.5  # from then on; chosen
_PAUSED_S = 5 * INTERVAL_S  # between two looks while seconds do not count; chosen


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux, 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("rest", ctypes.c_byte * 44),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`: seconds and nanoseconds of the interval, and until the first time."""

    _fields_ = tuple(
        (name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")
    )


class _Timer:
    """Sends a signal to the thread that makes it."""

    def __init__(self, number: int) -> None:
        try:
            self._libc = ctypes.CDLL(None)
            if not hasattr(self._libc, "timer_create"):  # before glibc 2.34
                self._libc = ctypes.CDLL("librt.so.1")
            create = self._libc.timer_create
        except (OSError, AttributeError) as error:
            raise OSError("the C library has no timers") from error
        event = _Event(signal=number, notify=_TO_THREAD, thread=threading.get_native_id())
        self._id = ctypes.c_void_p()
        if create(_MONOTONIC, ctypes.byref(event), ctypes.byref(self._id)):
            raise OSError("no timer")

    def set(self, seconds: float) -> None:
        """Once, after a time below a second; 0 takes it back."""
        times = _Times(0, 0, 0, int(1e9 * seconds))
        self._libc.timer_settime(self._id, 0, ctypes.byref(times), None)


class InterruptSampler:
    """Counts seconds by what the main thread does; to be made in that thread.

    It looks at a random time, wherever that is; another thread could do so only where this one gives up the
    GIL. Within a call of C the look comes when that ends, and counts for all of it. While the thread sleeps,
    another one asks the kernel what for.

    Args: see `StackSampler`.

    Raises:
        OSError: this is not Linux, not the main thread, or there is no signal or timer for it.
    """

    def __init__(self, threads: Threads, is_on: Truth, evaluates: Truth) -> None:
        if sys.platform != "linux":
            raise OSError("the timer is Linux's")
        if threading.current_thread() is not threading.main_thread():
            raise OSError("Python calls handlers of signals in the main thread")
        number = signal.SIGRTMAX - _FROM_END
        taken = signal.getsignal(number)
        is_ours = isinstance(getattr(taken, "__self__", None), InterruptSampler)  # before a fork
        if taken is not signal.SIG_DFL and not is_ours:
            raise OSError("the signal is taken")
        self._threads, self._is_on, self._evaluates = threads, is_on, evaluates
        self._draw = random.Random(0)
        self._main = threading.get_native_id()
        self._seconds: dict[Activity, float] = defaultdict(float)
        self._waits: dict[Activity, Counter[str]] = defaultdict(Counter)
        self._of_others: dict[tuple[str, Seen], float] = defaultdict(float)
        self._states: list[str] = []  # that the kernel has reported since the last look
        self._asked = threading.Event()
        self._asked_until = 0.0
        self._last = time.perf_counter()
        self._last_used = time.thread_time()
        self._is_over = self._was_on = False
        # The handler stays: a signal that is on its way when the timer stops would end the process.
        signal.signal(number, self._look)
        signal.siginterrupt(number, False)  # calls of the kernel go on, where they can
        self._timer = _Timer(number)
        atexit.register(self.stop)

    @property
    def seconds(self) -> dict[tuple[str, Seen], float]:
        """By thread and activity; a look counts for the time since the one before."""
        found = dict(self._of_others)
        for activity, seconds in list(self._seconds.items()):
            phase, kind, place = activity
            states = dict(self._waits.get(activity, {})) or {"": 1}
            for state, count in states.items():
                share = count / sum(states.values())
                found["main", Seen(phase, kind, state, place)] = seconds * share
        return found

    def start(self) -> None:
        """Look until `stop`."""
        threading.Thread(target=self._ask_kernel, name=OWN_THREADS, daemon=True).start()
        self._last = time.perf_counter()
        self._was_on = True
        self._timer.set(INTERVAL_S)

    def stop(self) -> None:
        """No look begins any more."""
        self._is_over = True
        self._timer.set(0)
        self._asked.set()

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            return
        now = time.perf_counter()
        used = time.thread_time()
        elapsed = now - self._last
        used_since = used - self._last_used
        self._last, self._last_used = now, used
        # What goes wrong here, such as at the end of the stack, must not come up in the midst of the script.
        with suppress(Exception):
            was_on, self._was_on = self._was_on, self._is_on()
            if was_on and self._was_on:
                self._count(frame, elapsed, is_idle=elapsed - used_since > _IDLE * elapsed)
        # Never at a fixed time, which might fall in with the steps.
        seconds = INTERVAL_S if self._was_on else _PAUSED_S
        self._timer.set(seconds * (0.5 + self._draw.random()))

    def _count(self, frame: FrameType | None, elapsed: float, *, is_idle: bool) -> None:
        states, self._states = self._states, []
        evaluates = self._evaluates()
        activity = activity_of(frame)
        activity = activity._replace(phase=phase_of(activity.phase, evaluates))
        self._seconds[activity] += elapsed
        self._waits[activity].update(states)
        if is_idle and activity.phase in KERNEL_ASKED:
            self._asked_until = self._last + _ASKED_FOR_S
            self._asked.set()
        for name, numbers in self._threads().items():
            if name != "main" and (seen := look_at(*numbers, evaluates)) is not None:
                self._of_others[name, seen] += elapsed

    def _ask_kernel(self) -> None:
        while self._asked.wait() and not self._is_over:
            time.sleep(INTERVAL_S)
            if time.perf_counter() > self._asked_until:
                self._asked.clear()
            self._states.append(waits_for(self._main))


def sampler_of(
    threads: Threads,
    is_on: Truth = lambda: True,
    evaluates: Truth = lambda: False,
    *,
    interrupts: bool = True,
) -> InterruptSampler | StackSampler:
    """The best that there is here.

    Args:
        threads, is_on, evaluates: see `StackSampler`.
        interrupts: the main thread may look at itself.
    """
    if interrupts:
        with suppress(OSError):
            return InterruptSampler(threads, is_on, evaluates)
    return StackSampler(threads, is_on, evaluates)
