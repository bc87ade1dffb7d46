"""Work on threads against a plain loop; failures, forks and pickles."""

import os
import pickle
import threading
import time

import pytest

from flambeau.images import thread_pool as module
from flambeau.images.thread_pool import DecodePool


@pytest.mark.parametrize("threads", [None, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 37])
def test_every_number_is_worked_on_once(threads, count):
    pool, done = DecodePool(threads), []
    for _ in range(3):
        pool.each(count, done.append)
        assert sorted(done) == list(range(count))
        done.clear()


def test_threads_work_at_once_and_are_kept():
    pool, names = DecodePool(3), set()
    meeting = threading.Barrier(3, timeout=300)

    def work(number):
        names.add(threading.current_thread().name)
        meeting.wait()

    for _ in range(3):
        pool.each(3, work)
    assert len(names) == 3
    assert threading.current_thread().name in names


def test_one_thread_is_this_one():
    before, names = threading.active_count(), set()
    DecodePool(1).each(9, lambda number: names.add(threading.current_thread()))
    assert names == {threading.current_thread()}
    assert threading.active_count() == before


@pytest.mark.parametrize("threads", [1, 4])
def test_the_failure_of_the_smallest_number_is_raised(threads):
    pool, begun = DecodePool(threads), []

    def work(number):
        begun.append(number)
        if number == 5:
            time.sleep(0.02)  # number 6 fails first
        if number in (5, 6):
            raise ValueError(f"number {number}")

    for _ in range(5):
        begun.clear()
        with pytest.raises(ValueError, match="number 5"):
            pool.each(1000, work)
        assert len(begun) < 20
    pool.each(3, begun.append)  # it can still be used
    assert begun[-3:] == [0, 1, 2] or sorted(begun[-3:]) == [0, 1, 2]


def test_an_interrupt_stops_the_others():
    begun = []

    def work(number):
        begun.append(number)
        time.sleep(0.001)
        if threading.current_thread() is threading.main_thread() and number:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DecodePool(3).each(10_000, work)
    assert len(begun) < 1000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings(
    "ignore:.*fork:DeprecationWarning"
)  # there are threads, that is the point
def test_a_forked_child_has_threads_of_its_own():
    pool = DecodePool(3)
    pool.each(9, lambda number: None)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            meeting = threading.Barrier(3, timeout=300)
            pool.each(3, lambda number: meeting.wait())
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_a_pool_travels_to_a_process_of_its_own(run_python):
    pool = DecodePool(2)
    pool.each(9, lambda number: None)
    assert pickle.loads(pickle.dumps(pool))._started_in is None
    script = (
        "import pickle, sys; pool = pickle.loads(bytes.fromhex(sys.argv[1])); found = [0] * 9; "
        "pool.each(9, lambda number: found.__setitem__(number, number**2)); print(found)"
    )
    done = run_python("-c", script, pickle.dumps(pool).hex())
    assert done.stdout == f"{[number**2 for number in range(9)]}\n"


def test_how_many_by_default(monkeypatch):
    monkeypatch.setattr(module, "usable_cpus", lambda: 8)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert module._share_of_cpus() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert module._share_of_cpus() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "30")
    assert module._share_of_cpus() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(module, "get_worker_info", lambda: "a worker of a DataLoader")
    assert module._share_of_cpus() == 1


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="threads must be at least 1, got -1"):
        DecodePool(-1)
