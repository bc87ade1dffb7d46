"""A user's loader on several ranks and after a resume: samplers at any depth are found, or refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from flambeau.data.loading.user_dataloader import UserDataLoader
from flambeau.errors import InputError

DATA = TensorDataset(torch.arange(24))


class Wrapped(Sampler[int]):
    """A sampler around another, under a name of its own."""

    def __init__(self, inner: Sampler[int]) -> None:
        self.innermost = inner

    def __len__(self) -> int:
        return len(self.innermost)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return iter(self.innermost)


class Strided(Sampler[int]):
    """Shares the data by itself, and does not say so."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 24, 2))


class Stream(IterableDataset[int]):
    def __init__(self, rank: int) -> None:
        self.offset = rank

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.offset, 24, 2))


def share(rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas=2, rank=rank, shuffle=True)


def accelerated(rank: int) -> DataLoader[Any]:
    data_loader = pytest.importorskip("accelerate.data_loader")
    inner = BatchSampler(RandomSampler(DATA), 4, drop_last=False)
    shard = data_loader.BatchSamplerShard(inner, num_processes=2, process_index=rank)
    return DataLoader(DATA, batch_sampler=shard)


def in_batches(sampler: Sampler[int]) -> DataLoader[Any]:
    return DataLoader(DATA, batch_sampler=BatchSampler(sampler, 4, drop_last=False))


@pytest.mark.parametrize(
    "loader",
    [
        lambda rank: in_batches(share(rank)),
        lambda rank: in_batches(Wrapped(Wrapped(share(rank)))),
        lambda rank: DataLoader(DATA, 4, sampler=Wrapped(share(rank))),
        accelerated,
    ],
)
def test_shares_are_found_at_any_depth(loader: Callable[[int], DataLoader[Any]]) -> None:
    epochs: list[list[int]] = [[], []]
    for rank in range(2):
        batches = UserDataLoader(loader(rank), accumulate=1, seed=0, rank=rank, world=2)
        assert batches.are_shares
        for number, micro in enumerate(batches.stream(epoch=0, position=0, epochs=2)):
            epochs[number // 3] += micro.data[0].tolist()
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(24))
    assert epochs[0] != epochs[1]  # set_epoch was called


@pytest.mark.parametrize(
    ("rank", "world", "message"),
    [
        (0, 1, "shares the data among 2 processes, and this job has 1"),
        (0, 3, "shares the data among 2 processes, and this job has 3"),
        (1, 2, "gives this process, rank 1, the share of rank 0"),
    ],
)
def test_shares_of_another_job_are_refused(rank: int, world: int, message: str) -> None:
    with pytest.raises(InputError, match=f"the loader's DistributedSampler {message}"):
        UserDataLoader(in_batches(share(0)), accumulate=1, seed=0, rank=rank, world=world)


@pytest.mark.parametrize(
    "loader",
    [lambda rank: in_batches(Strided(rank)), lambda rank: DataLoader(Stream(rank), 4)],
)
def test_shares_that_nothing_tells_of_are_refused(
    loader: Callable[[int], DataLoader[Any]],
) -> None:
    told: list[Any] = []

    def first_of(rank: int, gather: Callable[[Any], list[Any]]) -> None:
        batches = UserDataLoader(
            loader(rank), accumulate=1, seed=0, rank=rank, world=2, gather=gather
        )
        next(batches.stream(epoch=0, position=0))

    first_of(0, lambda value: told.append(value) or [value, value])  # type: ignore[func-returns-value]
    assert len(told) == 1
    with pytest.raises(InputError, match="gives rank 1 another first batch than rank 0"):
        first_of(1, lambda value: [told[0], value])


class LazyBatches:
    """A loader that is no DataLoader, and draws when a batch is asked for."""

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        return (torch.randint(1000, (4,)) for _ in range(6))


class LazySampler(Sampler[int]):
    """Draws an index when it is asked for one."""

    def __len__(self) -> int:
        return 96

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(1000, ())) for _ in range(96))


def lazy_loader(num_workers: int) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(1000))
    return DataLoader(data, 8, sampler=LazySampler(), num_workers=num_workers)


@pytest.mark.parametrize("make", [LazyBatches, lambda: lazy_loader(0), lambda: lazy_loader(1)])
def test_what_is_drawn_in_mid_epoch_is_as_before_a_resume(make: Callable[[], Any]) -> None:
    def read(position: int) -> list[torch.Tensor]:
        loader = UserDataLoader(make(), accumulate=1, seed=3)
        found = []
        for micro in loader.stream(epoch=0, position=position, epochs=1):
            found.append(micro.data[0] if isinstance(micro.data, list) else micro.data)
            torch.rand(5 + position)  # as training does
        return found

    whole = read(0)
    torch.testing.assert_close(read(5), whole[5:], rtol=0, atol=0)
    assert len({batch.sum().item() for batch in whole}) == len(whole)
