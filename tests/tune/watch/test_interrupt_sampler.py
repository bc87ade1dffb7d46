"""Samples that the main thread takes of itself: right for microseconds and for sleep; nothing is left."""

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from flambeau.tune.watch import interrupt_sampler
from flambeau.tune.watch.interrupt_sampler import InterruptSampler, sampler_of
from flambeau.tune.watch.stack_sampler import StackSampler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="timers of Linux")
NUMBER = signal.SIGRTMAX - 3


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(interrupt_sampler, "INTERVAL_S", 0.001)
    yield
    signal.signal(NUMBER, signal.SIG_DFL)


@contextlib.contextmanager
def looking() -> Iterator[InterruptSampler]:
    main = threading.get_ident(), threading.get_native_id()
    sampler = sampler_of(lambda: {"main": main})
    assert isinstance(sampler, InterruptSampler)
    sampler.start()
    try:
        yield sampler
    finally:
        sampler.stop()


def seconds_in(sampler: InterruptSampler, *names: str) -> list[float]:
    found = dict.fromkeys(names, 0.0)
    for (thread, seen), seconds in sampler.seconds.items():
        assert thread == "main"
        if seen.location is not None and seen.location.function in found:
            found[seen.location.function] += seconds
    return list(found.values())


def in_c(count: int) -> int:
    return sum(range(count))


def in_python(count: int) -> int:
    total = 0
    for number in range(count):
        total += number
    return total


def test_shares_of_short_pieces() -> None:
    spent = [0.0, 0.0]  # CPU time, which a busy machine does not change
    with looking() as sampler:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            began = time.thread_time()
            in_c(4000)
            between = time.thread_time()
            in_python(500)
            spent[0] += between - began
            spent[1] += time.thread_time() - between
    seen = seconds_in(sampler, "in_c", "in_python")
    expected = spent[0] / sum(spent)
    assert 0.1 < expected < 0.9
    assert seen[0] / sum(seen) == pytest.approx(expected, abs=0.15)


def asleep() -> None:
    time.sleep(0.05)  # long beside what a busy machine lets it wait for a CPU


def test_the_kernel_is_asked_what_a_sleep_is() -> None:
    with looking() as sampler:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            asleep()
    waits = {"sleep": 0.0, "": 0.0}
    for (_, seen), seconds in sampler.seconds.items():
        if seen.location is not None and seen.location.function == "asleep":
            waits[seen.waits] += seconds
    assert waits["sleep"] > waits[""]  # where the machine is busy, it also waits for a CPU


def test_nothing_comes_after_its_end() -> None:
    with looking() as sampler:
        in_python(1000)
    then = dict(sampler.seconds)
    in_python(1_000_000)
    assert sampler.seconds == then


def test_a_signal_on_its_way_ends_no_process() -> None:
    script = """
from flambeau.tune.watch import interrupt_sampler as module
module.INTERVAL_S = 0.00002
for _ in range(300):
    sampler = module.sampler_of(dict)
    sampler.start()
    sum(range(300))
    sampler.stop()
module.sampler_of(dict).start()
print(type(sampler).__name__)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "InterruptSampler\n"), done.stderr


def test_a_signal_that_is_taken_is_left_alone() -> None:
    def theirs(number: int, frame: object) -> None: ...

    signal.signal(NUMBER, theirs)
    assert isinstance(sampler_of(dict), StackSampler)
    assert signal.getsignal(NUMBER) is theirs


def test_another_thread_is_looked_at_from_outside() -> None:
    made: list[object] = []
    thread = threading.Thread(target=lambda: made.append(sampler_of(dict)))
    thread.start()
    thread.join()
    assert isinstance(made[0], StackSampler)
