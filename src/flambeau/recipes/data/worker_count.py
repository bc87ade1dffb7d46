"""How many workers a DataLoader needs: measured with your data, beside your training step.

DataLoader 需要多少个 worker：用您的数据实测，可以和训练步一起测。

Source: own. The field's rules of thumb (four per GPU, one per core) know neither the data nor the machine.
Not for the first read of data from a disk: all rounds after the first find them in the page cache.
"""

import itertools
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader


@dataclass(frozen=True)
class WorkerSpeed:
    """What a number of workers gives.

    Attributes:
        num_workers: 0 reads in the process that trains.
        batches_per_s: median over the rounds, without the batches that were ready at the start.
        spread: the least and the most of the rounds.
        start_s: until the first batch is there, in every epoch without `persistent_workers`; median.
    """

    num_workers: int
    batches_per_s: float
    spread: tuple[float, float]
    start_s: float


def measure_workers(
    make_loader: Callable[[int], DataLoader[Any]],
    *,
    counts: Sequence[int] | None = None,
    step: Callable[[Any], object] | None = None,
    seconds: float = 2.0,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> list[WorkerSpeed]:
    """Read a while with each number of workers, in turn and in a new order each round.

    Args:
        make_loader: from a number of workers a new DataLoader, with the batch size and the transforms of the
            training. One epoch must have more batches than the workers fetch ahead.
        counts: numbers of workers; by default 0, 1, 2, 4 ... and the cores that this process may use.
        step: what is done with each batch, such as a training step, whose processor time the workers then
            share. On a GPU it should wait for the device. None reads alone.
        seconds: of reading per number of workers and round; it may end earlier, with the epoch.
        rounds: repetitions; one more comes first and does not count.
        clock: seconds that only go up.

    Returns:
        One entry per number, in the order of `counts`.

    Raises:
        ValueError: a negative or repeated count, no round, too few batches in an epoch.

    Example:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.zeros(256, 3))
        >>> speeds = measure_workers(
        ...     lambda workers: DataLoader(data, batch_size=8, num_workers=workers), counts=[0, 1], rounds=1
        ... )
        >>> [speed.num_workers for speed in speeds]
        [0, 1]
    """
    counts = _default_counts() if counts is None else list(counts)
    if not counts or min(counts) < 0 or len(set(counts)) < len(counts):
        raise ValueError(f"counts must be different numbers from 0 up, got {counts}")
    if rounds < 1 or seconds <= 0:
        raise ValueError(f"rounds and seconds must be above 0, got {rounds} and {seconds}")
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    shuffle = random.Random(0)
    for number in range(rounds + 1):
        for count in shuffle.sample(counts, len(counts)):
            figures = _one(make_loader(count), step or (lambda _batch: None), seconds, clock)
            if number:
                found[count].append(figures)
    speeds = []
    for count, pairs in found.items():
        rates = [rate for rate, _ in pairs]
        start_s = statistics.median(start for _, start in pairs)
        spread = (min(rates), max(rates))
        speeds.append(WorkerSpeed(count, statistics.median(rates), spread, start_s))
    return speeds


def fewest_workers(speeds: Sequence[WorkerSpeed], *, within: float = 0.05) -> int:
    """The least number of workers that is as fast as the fastest, but for this share.

    More than that takes memory and cores, and gives nothing.

    Args:
        speeds: of `measure_workers`.
        within: in [0, 1).

    Raises:
        ValueError: no speeds, or a share outside its range.

    Example:
        >>> speeds = [WorkerSpeed(n, rate, (rate, rate), 0.1) for n, rate in [(0, 9), (2, 39), (4, 40)]]
        >>> fewest_workers(speeds)
        2
    """
    if not speeds or not 0 <= within < 1:
        raise ValueError(f"speeds must not be empty and within must be in [0, 1), got {within}")
    enough = (1 - within) * max(speed.batches_per_s for speed in speeds)
    return min(speed.num_workers for speed in speeds if speed.batches_per_s >= enough)


def _default_counts() -> list[int]:
    cores = len(os.sched_getaffinity(0))
    powers = itertools.takewhile(lambda count: count < cores, (2**power for power in range(10)))
    return [0, *powers, cores]


def _one(
    loader: DataLoader[Any],
    step: Callable[[Any], object],
    seconds: float,
    clock: Callable[[], float],
) -> tuple[float, float]:
    """Batches per second, and seconds until the first batch."""
    ahead = loader.num_workers * (loader.prefetch_factor or 0)  # fetched while the first one was
    began = clock()
    batches = iter(loader)
    start_s = 0.0
    since = began
    count = 0
    for number, batch in enumerate(batches):
        if number == 0:
            start_s = clock() - began
        step(batch)
        if number == ahead:
            since = clock()
        elif number > ahead:
            count += 1
            if clock() - since >= seconds:
                break
    if not count:
        raise ValueError(
            f"an epoch must have more than {ahead + 1} batches to measure {loader.num_workers} workers: "
            "take a smaller batch size, fewer workers, or repeat the data with ConcatDataset"
        )
    return count / max(clock() - since, 1e-9), start_s
