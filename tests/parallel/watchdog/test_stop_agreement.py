"""Ranks as threads, with a store in memory: all stop at one point, whatever their speed, and none waits."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.distributed import HashStore

from flambeau.parallel.watchdog.stop_agreement import StopAgreement

_WAIT_S = 20.0


@pytest.fixture
def _often() -> Iterator[None]:
    """Threads take turns after a few byte codes, not after 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _ranks(world: int) -> tuple[HashStore, list[StopAgreement], list[str | None]]:
    asked: list[str | None] = [None] * world
    ranks = [
        StopAgreement(rank=rank, world=world, stop_signal=lambda rank=rank: asked[rank])
        for rank in range(world)
    ]
    return HashStore(), ranks, asked


def test_all_stop_at_the_furthest_point_that_one_is_committed_to() -> None:
    store, ranks, asked = _ranks(3)
    for rank, reached in enumerate((5, 6, 4)):
        for _ in range(reached):
            assert ranks[rank].reach_point() is None
    asked[2] = "SIGTERM"
    assert ranks[2].has_new_request
    for rank in (2, 0, 1, 2, 0):
        ranks[rank].exchange(store)
    assert not ranks[2].has_new_request
    assert [rank.stops_next for rank in ranks] == [False, True, False]
    answers = [[rank.reach_point() for _ in range(7 - rank.point)] for rank in ranks]
    assert answers == [[None, "SIGTERM"], ["SIGTERM"], [None, None, "SIGTERM"]]
    assert [rank.reach_point() for rank in ranks] == [
        "SIGTERM"
    ] * 3  # one that goes on all the same


def test_nothing_is_settled_before_all_have_answered() -> None:
    store, ranks, asked = _ranks(2)
    asked[0] = "SIGUSR1"
    ranks[0].exchange(store)
    assert not ranks[0].stops_next
    waiting = threading.Thread(target=ranks[0].reach_point, daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    assert ranks[1].reach_point() is None  # has not heard of it: it passes
    ranks[1].exchange(store)
    ranks[0].exchange(store)
    waiting.join(_WAIT_S)
    assert not waiting.is_alive()
    assert ranks[0].reach_point() == ranks[1].reach_point() == "SIGUSR1"


def test_a_point_that_is_passed_meanwhile_is_counted() -> None:
    store, (rank, _), asked = _ranks(2)

    class Slow:
        """The main thread passes a point while the other reads that there is a stop."""

        def __getattr__(self, name: str) -> Any:
            return getattr(store, name)

        def get(self, key: str) -> bytes:
            assert rank.reach_point() is None
            return store.get(key)

    asked[0] = "SIGTERM"
    rank.exchange(Slow())  # type: ignore[arg-type]
    assert store.get("point/0") == b"2"


def test_two_signals_are_one_stop() -> None:
    store, ranks, asked = _ranks(2)
    asked[:] = "SIGTERM", "SIGINT"
    for rank in (0, 1, 0):
        ranks[rank].exchange(store)
    assert [rank.reach_point() for rank in ranks] == ["SIGTERM"] * 2


def test_who_has_left_is_not_waited_for_and_the_run_ends_by_itself() -> None:
    store, ranks, asked = _ranks(2)
    for _ in range(3):
        ranks[0].reach_point()
    ranks[0].leave(store)
    asked[1] = "SIGTERM"
    ranks[1].exchange(store)
    assert not ranks[1].stops_next
    assert [ranks[1].reach_point() for _ in range(3)] == [None] * 3
    ranks[1].leave(store)


def test_without_an_agreement_the_run_goes_on() -> None:
    store, ranks, asked = _ranks(2)
    asked[0] = "SIGTERM"
    ranks[0].exchange(store)
    ranks[0].abandon()
    assert ranks[0].reach_point() is None


def test_one_rank_stops_at_once_and_needs_no_store() -> None:
    _, (rank,), asked = _ranks(1)
    assert rank.reach_point() is None
    assert not rank.stops_next
    asked[0] = "SIGINT"
    assert rank.stops_next
    assert rank.reach_point() == "SIGINT"


@dataclass
class _Case:
    """A job of threads: steps of random length, some with a collective, some with a long evaluation."""

    seed: int
    world: int = field(init=False)

    def __post_init__(self) -> None:
        generator = random.Random(self.seed)
        self.world = generator.randint(2, 4)
        self.num_points = generator.randint(1, 30)
        kinds = ("free", "collective", "collective", "evaluation")
        self.kinds = [generator.choice(kinds) for _ in range(self.num_points)]
        self.slow_s = [generator.choice((0.0, 0.0002, 0.001)) for _ in range(self.world)]
        self.poll_s = [generator.choice((0.0001, 0.0005, 0.003)) for _ in range(self.world)]
        self.asking = generator.sample(range(self.world), generator.choice((1, 1, 2)))
        self.ask_at = {rank: generator.randint(0, self.num_points) for rank in self.asking}
        self.store, self.ranks, self.asked = _ranks(self.world)
        self.barrier = threading.Barrier(self.world)
        self.stopped: list[tuple[int, str] | None] = [None] * self.world
        self.cut: list[list[int]] = [[] for _ in range(self.world)]
        self.is_done = [False] * self.world
        self.errors: list[BaseException] = []

    def main_thread(self, rank: int) -> None:
        generator = random.Random(self.seed * 10 + rank)
        try:
            for point, kind in enumerate(self.kinds, start=1):
                if self.ask_at.get(rank) == point:
                    self.asked[rank] = "SIGTERM"
                time.sleep(self.slow_s[rank] * generator.random())
                if kind == "evaluation":
                    for _ in range(20):
                        if self.ranks[rank].stops_next:
                            self.cut[rank].append(point)
                            break
                        time.sleep(0.0001)
                if kind != "free":
                    self.barrier.wait(_WAIT_S)
                signal = self.ranks[rank].reach_point()
                if signal is not None:
                    self.stopped[rank] = point, signal
                    break
        except BaseException as error:
            self.errors.append(error)
        self.is_done[rank] = True

    def other_thread(self, rank: int) -> None:
        news = 0
        while not self.is_done[rank]:
            fresh = self.store.add("changes", 0)
            if fresh != news or self.ranks[rank].has_new_request:
                news = fresh
                self.ranks[rank].exchange(self.store)
            time.sleep(self.poll_s[rank])
        self.ranks[rank].leave(self.store)

    def run(self) -> None:
        threads = [
            threading.Thread(target=target, args=(rank,), daemon=True)
            for rank in range(self.world)
            for target in (self.main_thread, self.other_thread)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + _WAIT_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"


@pytest.mark.usefixtures("_often")
def test_two_hundred_jobs() -> None:
    num_stopped = num_cut = 0
    for seed in range(200):
        case = _Case(seed)
        case.run()
        assert not case.errors, (seed, case.errors)
        assert len(set(case.stopped)) == 1, (seed, case.stopped)
        stop = case.stopped[0]
        for cut in case.cut:  # what was cut short was followed by the stop at once, on every rank
            assert not cut or (stop is not None and cut == [stop[0]]), (seed, cut, stop)
        num_stopped += stop is not None
        num_cut += any(case.cut)
    assert num_stopped > 50
    assert num_cut > 10
