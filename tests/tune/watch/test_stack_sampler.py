"""A look at another thread's stack: what it finds, and that it leaves nothing behind."""

import gc
import threading
from types import FrameType

from flambeau.tune.watch.stack_sampler import StackSampler


def _look_at_this_thread() -> StackSampler:
    threads = {"main": (threading.get_ident(), threading.get_native_id())}
    sampler = StackSampler(lambda: threads)
    looks = threading.Thread(target=sampler._sample, args=(0.5,))
    looks.start()
    looks.join()
    return sampler


def test_a_look_counts_the_time_for_the_line_at_which_the_thread_is() -> None:
    sampler = _look_at_this_thread()
    ((thread, seen),) = sampler.seconds
    assert thread == "main"
    assert seen.location is not None
    assert seen.location.file == __file__
    assert sampler.seconds[thread, seen] == 0.5


def test_a_thread_that_has_ended_is_passed_over() -> None:
    sampler = StackSampler(lambda: {"gone": (-1, -1)})
    sampler._sample(0.5)
    assert not sampler.seconds


def test_a_look_leaves_no_cycle_of_frames() -> None:
    # Python 3.11 ends with SIGSEGV, some time, when it collects one with the frames of other threads.
    gc.collect()
    gc.disable()
    try:
        _look_at_this_thread()
        left = [one.f_code.co_name for one in gc.get_objects() if isinstance(one, FrameType)]
    finally:
        gc.enable()
    assert "_look" not in left
    assert "_activity_in" not in left
