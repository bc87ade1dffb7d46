"""Stack samples that the main thread takes of itself, between two instructions, on a timer's signal."""

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
    KERNEL_STATE_PHASES,
    Predicate,
    StackSample,
    StackSampler,
    Threads,
    phase_of,
    sample_thread,
)
from flambeau.tune.watch.thread_state import WATCH_THREADS, waits_for

_FROM_END = 3  # which real-time signal: other programs take the first or the last ones; chosen
_MONOTONIC, _TO_THREAD = 1, 4  # CLOCK_MONOTONIC, SIGEV_THREAD_ID of Linux
_IDLE = 0.25  # a larger share without CPU between two samples starts kernel queries; chosen
_KERNEL_S = 0.5  # for so long; chosen
_PAUSED_S = 5 * INTERVAL_S  # between two samples while seconds do not count; chosen


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
    """`struct itimerspec`: interval and time until the first signal, in seconds and nanoseconds."""

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
        """Fire once after less than a second; 0 cancels it."""
        times = _Times(0, 0, 0, int(1e9 * seconds))
        self._libc.timer_settime(self._id, 0, ctypes.byref(times), None)


class InterruptSampler:
    """Counts seconds by what the main thread does; make it in that thread.

    It samples at random times, anywhere in the code, not only where the GIL is given up. In a call of C the
    sample is taken at its end, and counts for all of it. While the main thread sleeps, another asks the
    kernel what it waits for.
    """

    def __init__(self, threads: Threads, is_on: Predicate, evaluates: Predicate) -> None:
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
        self._other_threads: dict[tuple[str, StackSample], float] = defaultdict(float)
        self._states: list[str] = []  # reported by the kernel since the last sample
        self._asks_kernel = threading.Event()
        self._asks_until = 0.0
        self._last = time.perf_counter()
        self._last_used = time.thread_time()
        self._is_over = self._was_on = False
        # The handler stays: without it, a signal that arrives after the timer stops ends the process.
        signal.signal(number, self._sample)
        signal.siginterrupt(number, False)  # system calls are restarted where possible
        self._timer = _Timer(number)
        atexit.register(self.stop)

    @property
    def seconds(self) -> dict[tuple[str, StackSample], float]:
        """By thread and activity; a sample counts for the time since the sample before."""
        result = dict(self._other_threads)
        for activity, seconds in list(self._seconds.items()):
            phase, kind, location = activity
            states = dict(self._waits.get(activity, {})) or {"": 1}
            for state, count in states.items():
                share = count / sum(states.values())
                result["main", StackSample(phase, kind, state, location)] = seconds * share
        return result

    def start(self) -> None:
        threading.Thread(target=self._ask_kernel, name=WATCH_THREADS, daemon=True).start()
        self._last = time.perf_counter()
        self._was_on = True
        self._timer.set(INTERVAL_S)

    def stop(self) -> None:
        self._is_over = True
        self._timer.set(0)
        self._asks_kernel.set()

    def _sample(self, number: int, frame: FrameType | None) -> None:
        if self._is_over:
            return
        now = time.perf_counter()
        used = time.thread_time()
        elapsed = now - self._last
        used_since = used - self._last_used
        self._last, self._last_used = now, used
        # An error here, as when the stack is nearly exhausted, must not surface in the script.
        with suppress(Exception):
            was_on, self._was_on = self._was_on, self._is_on()
            if was_on and self._was_on:
                self._count(frame, elapsed, is_idle=elapsed - used_since > _IDLE * elapsed)
        # Random, as a fixed interval might coincide with the steps.
        seconds = INTERVAL_S if self._was_on else _PAUSED_S
        self._timer.set(seconds * (0.5 + self._draw.random()))

    def _count(self, frame: FrameType | None, elapsed: float, *, is_idle: bool) -> None:
        states, self._states = self._states, []
        evaluates = self._evaluates()
        activity = activity_of(frame)
        activity = activity._replace(phase=phase_of(activity.phase, evaluates))
        self._seconds[activity] += elapsed
        self._waits[activity].update(states)
        if is_idle and activity.phase in KERNEL_STATE_PHASES:
            self._asks_until = self._last + _KERNEL_S
            self._asks_kernel.set()
        for name, numbers in self._threads().items():
            if name != "main" and (sample := sample_thread(*numbers, evaluates)) is not None:
                self._other_threads[name, sample] += elapsed

    def _ask_kernel(self) -> None:
        while self._asks_kernel.wait() and not self._is_over:
            time.sleep(INTERVAL_S)
            if time.perf_counter() > self._asks_until:
                self._asks_kernel.clear()
            self._states.append(waits_for(self._main))


def sampler_of(
    threads: Threads,
    is_on: Predicate = lambda: True,
    evaluates: Predicate = lambda: False,
    *,
    interrupts: bool = True,
) -> InterruptSampler | StackSampler:
    """The best sampler available here; see `StackSampler`."""
    if interrupts:
        with suppress(OSError):
            return InterruptSampler(threads, is_on, evaluates)
    return StackSampler(threads, is_on, evaluates)
