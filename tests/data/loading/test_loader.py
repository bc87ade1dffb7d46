"""The loader: order, seeds and batches that no number of workers and no resume point can change."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.loader import Loader, ReadOptions, is_dataset
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.data.loading.seeded_dataset import SeededDataset
from flambeau.data.loading.user_dataloader import UserDataLoader
from flambeau.errors import InputError
from flambeau.recipes.data.sample_order import sample_order, sample_seeds


class Noisy(Dataset[tuple[Tensor, float, float]]):
    """Draws from all three global generators, as people's transforms do."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, float, float]:
        return torch.randn(2) + index, random.random(), float(np.random.rand())


class Seeded(SeededDataset):
    """Gives back what it was asked for."""

    def __len__(self) -> int:
        return 23

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Sequence[int]]:
        if 22 in indices.tolist():
            return (indices, seeds), [22]
        return (indices, seeds), []

    def describe(self, index: int) -> str:
        return f"image {index}"


class Broken(Seeded):
    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Sequence[int]]:
        raise InputError("photo.jpg cannot be decoded")


def all_of(loader: Loader | UserDataLoader, **start: int) -> list[MicroBatch]:
    return list(loader.stream(**{"epoch": 0, "position": 0, "epochs": 2, **start}))


def test_batches_are_slices_of_the_order() -> None:
    loader = Loader(Seeded(), BatchLayout(4, accumulate=2), seed=9)
    parts = all_of(loader)
    for epoch in (0, 1):
        of_epoch = parts[epoch * 6 : epoch * 6 + 6]
        order = sample_order(23, seed=9, epoch=epoch)
        assert torch.equal(torch.cat([p.data[0] for p in of_epoch]), order)
        seeds = torch.cat([p.data[1] for p in of_epoch])
        assert torch.equal(seeds, sample_seeds(order, seed=9, epoch=epoch))
        assert [p.size for p in of_epoch] == [4, 4, 4, 4, 4, 3]
        assert [p.total for p in of_epoch] == [8, 8, 8, 8, 7, 7]
        assert [p.ends_batch for p in of_epoch] == [False, True] * 3
        assert [p.ends_epoch for p in of_epoch] == [False] * 5 + [True]
        assert [p.position for p in of_epoch] == [4, 8, 12, 16, 20, 23]
        assert loader.batch_indices(epoch=epoch, batch=1) == order[8:16].tolist()
    assert loader.batches_per_epoch == 3


def test_a_sample_that_is_drawn_again_has_another_seed() -> None:
    class Again:
        def __len__(self) -> int:
            return 8

        def order(self, epoch: int) -> Tensor:
            return torch.tensor([5, 3, 5, 22, 5, 3, 0, 1])

    loader = Loader(Seeded(), BatchLayout(4), seed=9, sampler=Again())
    indices, seeds = (torch.cat([p.data[k] for p in all_of(loader, epochs=1)]) for k in (0, 1))
    assert torch.equal(indices, Again().order(0))
    first = sample_seeds(indices, seed=9, epoch=0) == seeds
    assert first.tolist() == [True, True, False, True, False, False, True, True]
    assert len(seeds.unique()) == 8
    later = torch.cat([p.data[1] for p in all_of(loader, epochs=1, position=4)])
    assert torch.equal(later, seeds[4:])


def test_a_lone_sample_joins_the_part_before_it() -> None:
    sizes = [p.size for p in all_of(Loader(Seeded(), BatchLayout(11, accumulate=3)), epochs=1)]
    assert sizes == [11, 12]
    sizes = [p.size for p in all_of(Loader(Seeded(), BatchLayout(1, accumulate=2)), epochs=1)]
    assert sizes == [1] * 23  # whoever asks for single samples gets them


@pytest.mark.parametrize("dataset", [Noisy(), Seeded()], ids=["plain", "seeded"])
def test_workers_and_resume_points_change_nothing(dataset: Dataset[Any]) -> None:
    whole = all_of(Loader(dataset, BatchLayout(4, accumulate=2), seed=1))
    assert not torch.equal(whole[0].data[0], whole[6].data[0])  # another epoch, another batch
    for workers in (0, 2):
        for parts_done in (0, 2, 4, 6, 8):
            epoch, position = divmod(parts_done, 6)
            start = whole[parts_done - 1].position if position else 0
            loader = Loader(
                dataset, BatchLayout(4, accumulate=2), seed=1, reading=ReadOptions(workers=workers)
            )
            rest = all_of(loader, epoch=epoch, position=start, epochs=2 - epoch)
            assert len(rest) == len(whole) - parts_done
            for got, expected in zip(rest, whole[parts_done:], strict=True):
                assert got.indices.tolist() == expected.indices.tolist()
                assert got[2:] == expected[2:]
                torch.testing.assert_close(got.data, expected.data, rtol=0, atol=0)


def test_seeds_alternate_where_the_dataset_asks_for_it() -> None:
    class Alternating(Seeded):
        alternates = True

    def seeds_of(dataset: Seeded, epoch: int) -> Tensor:
        parts = all_of(Loader(dataset, BatchLayout(8), seed=4), epoch=epoch, epochs=1)
        indices, seeds = (
            torch.cat(column) for column in zip(*(p.data for p in parts), strict=True)
        )
        return seeds[indices.argsort()]

    first, second, third = (seeds_of(Alternating(), epoch) < 0 for epoch in range(3))
    assert torch.equal(second, ~first) and torch.equal(third, first)
    assert torch.equal(seeds_of(Alternating(), 0), seeds_of(Seeded(), 0))
    assert not torch.equal(seeds_of(Seeded(), 1) < 0, second)


def test_a_sample_is_the_same_in_every_batch() -> None:
    """What is random about a sample depends on (seed, epoch, index), not on its neighbours."""

    def by_index(micro: int) -> dict[int, list[float]]:
        found = {}
        for part in all_of(Loader(Noisy(), BatchLayout(micro), seed=3), epochs=1):
            for row, index in enumerate(part.indices.tolist()):
                found[index] = [*part.data[0][row].tolist(), part.data[1][row], part.data[2][row]]
        return found

    assert by_index(5) == by_index(23) == by_index(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_global_generators_alone(workers: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    loader = Loader(Noisy(), BatchLayout(8), reading=ReadOptions(workers=workers))
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    expected = draw()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    all_of(loader, epochs=1)
    assert draw() == expected


def test_tensor_dataset_takes_the_fast_way_to_the_same_batches() -> None:
    tensors = torch.arange(23), torch.randn(23, 3)
    parts = all_of(Loader(TensorDataset(*tensors), BatchLayout(6), seed=2), epochs=1)
    order = sample_order(23, seed=2, epoch=0)
    assert torch.equal(torch.cat([p.data[0] for p in parts]), order)
    assert torch.equal(torch.cat([p.data[1] for p in parts]), tensors[1][order])


def test_a_tensor_dataset_with_samples_of_its_own_or_a_collate_is_read_by_them() -> None:
    class Shifted(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return tuple(t + 100 for t in super().__getitem__(index))

    (part,) = all_of(Loader(Shifted(torch.arange(3)), BatchLayout(3), shuffle=False), epochs=1)
    assert part.data[0].tolist() == [100, 101, 102]
    reading = ReadOptions(collate=lambda samples: torch.stack([x for (x,) in samples]) * 2)
    data = TensorDataset(torch.arange(3))
    (part,) = all_of(Loader(data, BatchLayout(3), shuffle=False, reading=reading), epochs=1)
    assert part.data.tolist() == [0, 2, 4]


def test_evaluation_visits_each_sample_once_in_order() -> None:
    parts = all_of(Loader(Seeded(), BatchLayout(5), shuffle=False), epochs=1)
    assert torch.cat([p.data[0] for p in parts]).tolist() == list(range(23))


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_reported_here(workers: int) -> None:
    seen: list[int] = []
    loader = Loader(
        Seeded(), BatchLayout(5), on_bad=seen.extend, reading=ReadOptions(workers=workers)
    )
    all_of(loader)
    assert seen == [22, 22]
    assert loader.describe(22) == "image 22"


@pytest.mark.parametrize("workers", [0, 2])
def test_the_users_mistake_arrives_as_it_was_said(workers: int) -> None:
    with pytest.raises(InputError) as caught:
        all_of(Loader(Broken(), BatchLayout(5), reading=ReadOptions(workers=workers)))
    assert str(caught.value) == "photo.jpg cannot be decoded"


class Ragged(Dataset[dict[str, Tensor]]):
    """The mask of one sample is not as large as its image."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": torch.zeros(3, 8, 8), "mask": torch.zeros(7 if index == 5 else 8, 8)}


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_do_not_make_a_batch_are_named(workers: int) -> None:
    with pytest.raises(RuntimeError) as caught:
        all_of(Loader(Ragged(), BatchLayout(20), seed=1, reading=ReadOptions(workers=workers)))
    said = f"{caught.value} {getattr(caught.value, '__notes__', [])}"
    order = sample_order(40, seed=1, epoch=0).tolist()
    batch = order[:20] if 5 in order[:20] else order[20:]
    text = ", ".join(map(str, batch[:16]))
    assert f"flambeau: this was the batch of samples {text} and 4 more" in said


def test_empty_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        Loader(TensorDataset(torch.zeros(0, 1)), BatchLayout(5))
    with pytest.raises(InputError, match="empty"):
        UserDataLoader([], accumulate=1, seed=0)


def test_ready_batches_of_a_shuffling_loader_resume() -> None:
    def ready() -> UserDataLoader:
        data = TensorDataset(torch.arange(23))
        return UserDataLoader(DataLoader(data, batch_size=4, shuffle=True), accumulate=4, seed=5)

    assert not is_dataset(DataLoader(TensorDataset(torch.arange(3))))
    whole = all_of(ready())
    assert [p.size for p in whole[:6]] == [4, 4, 4, 4, 4, 3]
    assert [p.total for p in whole[:6]] == [16, 16, 16, 16, 7, 7]
    assert [p.ends_batch for p in whole[:6]] == [False] * 3 + [True, False, True]
    assert [p.ends_epoch for p in whole[:6]] == [False] * 5 + [True]
    assert sorted(torch.cat([p.data[0] for p in whole[:6]]).tolist()) == list(range(23))
    assert not torch.equal(whole[0].data[0], whole[6].data[0])
    torch.manual_seed(99)  # what happened before does not matter
    rest = all_of(ready(), epoch=1, position=4, epochs=1)
    for got, expected in zip(rest, whole[10:], strict=True):
        assert torch.equal(got.data[0], expected.data[0])
        assert got[2:] == expected[2:]


def test_set_epoch_is_called() -> None:
    class Sampler:
        def __init__(self) -> None:
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    class Batches(list[Tensor]):
        __getitem__ = None  # type: ignore[assignment]  # a loader, not a dataset

    batches = Batches([torch.zeros(2, 1)] * 3)
    batches.sampler = Sampler()  # type: ignore[attr-defined]
    all_of(UserDataLoader(batches, accumulate=1, seed=0), epoch=3)
    assert batches.sampler.epochs == [3, 4]  # type: ignore[attr-defined]


def test_a_loader_that_miscounts_is_refused() -> None:
    class Liar:
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Any:
            return iter([torch.zeros(2, 1)] * 3)

    with pytest.raises(InputError, match="5 batches and made 3"):
        all_of(UserDataLoader(Liar(), accumulate=1, seed=0))
