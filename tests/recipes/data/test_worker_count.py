"""Numbers of workers, with clocks that the tests move."""

import multiprocessing
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flambeau.recipes.data.worker_count import WorkerSpeed, fewest_workers, measure_workers


class Clock:
    """Seconds that pass when a sample is read or a step is made."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Dataset[Tensor]):
    """Each sample takes a quarter of a second of the clock."""

    def __init__(self, clock: Clock, length: int = 64) -> None:
        self.clock, self.length = clock, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.length:
            raise IndexError
        self.clock.now += 0.25
        return torch.zeros(2)


def test_batches_per_second_and_the_start() -> None:
    clock = Clock()
    (speed,) = measure_workers(
        lambda workers: DataLoader(Slow(clock), batch_size=4, num_workers=workers),
        counts=[0],
        seconds=5,
        clock=clock,
    )
    assert speed == WorkerSpeed(0, 1.0, (1.0, 1.0), 1.0)


def test_the_step_counts_and_gets_every_batch() -> None:
    clock, seen = Clock(), list[int]()

    def step(batch: Tensor) -> None:
        seen.append(len(batch))
        clock.now += 3.0

    (speed,) = measure_workers(
        lambda workers: DataLoader(Slow(clock, 16), batch_size=4, num_workers=workers),
        counts=[0],
        step=step,
        rounds=2,
        seconds=100,
        clock=clock,
    )
    assert speed.batches_per_s == 0.25
    assert seen == [4] * 4 * 3  # a whole epoch, in each of two rounds and the one before


def test_reading_ends_after_its_seconds() -> None:
    clock = Clock()
    measure_workers(
        lambda workers: DataLoader(Slow(clock, 10**6), num_workers=workers),
        counts=[0],
        rounds=1,
        seconds=2,
        clock=clock,
    )
    assert clock.now == 2 * 2.25  # of two rounds, each with a batch before the clock starts


def test_workers_are_used_in_every_order_and_end() -> None:
    data = TensorDataset(torch.arange(96.0))
    made = list[int]()

    def loader(workers: int) -> DataLoader[Any]:
        made.append(workers)
        return DataLoader(data, batch_size=4, num_workers=workers)

    speeds = measure_workers(loader, counts=[2, 0, 1], rounds=4, seconds=0.01)
    assert [speed.num_workers for speed in speeds] == [2, 0, 1]
    assert all(speed.spread[0] <= speed.batches_per_s <= speed.spread[1] for speed in speeds)
    assert all(speed.start_s > 0 and speed.spread[0] > 0 for speed in speeds)
    orders = {tuple(made[start : start + 3]) for start in range(0, 15, 3)}
    assert len(made) == 15
    assert len(orders) > 1
    assert not multiprocessing.active_children()


def test_the_default_is_up_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(6)))
    asked = list[int]()

    def loader(workers: int) -> DataLoader[Any]:
        asked.append(workers)
        return DataLoader(TensorDataset(torch.arange(3.0)))

    measure_workers(loader, rounds=1)
    assert sorted(asked) == [0, 0, 1, 1, 2, 2, 4, 4, 6, 6]


def test_the_least_number_that_is_fast_enough() -> None:
    rates = {0: 10.0, 1: 30.0, 2: 38.5, 4: 40.0, 8: 39.0}
    speeds = [WorkerSpeed(count, rate, (rate, rate), 0.1) for count, rate in rates.items()]
    assert fewest_workers(speeds) == 2
    assert fewest_workers(speeds, within=0.0) == 4
    assert fewest_workers(speeds[::-1], within=0.3) == 1
    for wrong in ([], speeds):
        with pytest.raises(ValueError, match="within must be in"):
            fewest_workers(wrong, within=1.0 if wrong else 0.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"counts": [-1]}, r"different numbers from 0 up, got \[-1\]"),
        ({"counts": [1, 1]}, r"different numbers"),
        ({"counts": []}, r"different numbers"),
        ({"rounds": 0}, r"rounds and seconds must be above 0, got 0 and 2.0"),
        ({"seconds": 0}, r"must be above 0"),
        ({"counts": [2]}, r"more than 5 batches to measure 2 workers"),
    ],
)
def test_wrong_input(given: dict[str, Any], said: str) -> None:
    data = TensorDataset(torch.arange(5.0))
    with pytest.raises(ValueError, match=said):
        measure_workers(lambda workers: DataLoader(data, num_workers=workers), **given)
