"""Which threads of a worker compute."""

import threading
import time

from flambeau.tune.watch.thread_state import WATCH_THREADS, run_times
from flambeau.tune.watch.worker_watch import busy_threads


def test_threads_that_compute_are_counted_and_idle_ones_are_not() -> None:
    assert busy_threads({1: 5.0, 2: 1.0}, {1: 6.0, 2: 1.01, 3: 0.5}, 10.0) == 2


def test_the_kernel_tells_what_each_thread_has_had() -> None:
    ends = threading.Event()
    idle = threading.Thread(target=ends.wait)
    idle.start()
    then, found = run_times(), list[dict[int, float]]()

    def compute() -> None:
        end = time.thread_time() + 0.1
        while time.thread_time() < end:
            pass
        asks = threading.Thread(target=lambda: found.append(run_times()))
        asks.start()
        asks.join()

    busy, ours = (
        threading.Thread(target=compute),
        threading.Thread(target=ends.wait, name=WATCH_THREADS),
    )
    ours.start()
    busy.start()
    busy.join()
    ends.set()
    idle.join()
    ours.join()
    if then:  # elsewhere than on Linux nobody tells
        assert found[0][busy.native_id] > 0.05
        assert found[0][idle.native_id] < 0.05
        assert threading.get_native_id() in found[0]
        assert ours.native_id not in found[0]
