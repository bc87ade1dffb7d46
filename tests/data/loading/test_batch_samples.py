"""Ready batches of every kind that collate functions make: counted, and shared by samples."""

from collections import UserDict, namedtuple
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from flambeau.data.loading.batch_samples import count_samples, is_tensor_per_sample, slice_samples
from flambeau.data.loading.user_dataloader import UserDataLoader
from flambeau.data.loading.workers.transport import has_room, received, to_send
from flambeau.errors import InputError

Pair = namedtuple("Pair", ["image", "label"])


def image(number: int, *, side: int = 4) -> Tensor:
    return torch.full((3, side, side + number), float(number))


def target(number: int) -> dict[str, Tensor]:
    return {"boxes": torch.full((number, 4), float(number)), "labels": torch.arange(number)}


def detection(size: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    return [(image(n), target(n)) for n in range(size)]


def numbers_of(images: Iterable[Tensor]) -> list[int]:
    return [int(tensor[0, 0, 0]) for tensor in images]


class Ready:
    """A loader of one batch."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter([self.batch])


def stacked(size: int) -> tuple[Tensor, Tensor]:
    return torch.arange(size * 3.0).view(size, 3), torch.arange(size)


SAMPLES = 5
KINDS = {
    "stacked": (stacked(SAMPLES), lambda b: b[1].tolist()),
    "dict": ({"x": stacked(SAMPLES)[0], "y": stacked(SAMPLES)[1]}, lambda b: b["y"].tolist()),
    "UserDict": (UserDict(x=stacked(SAMPLES)[0], y=stacked(SAMPLES)[1]), lambda b: b["y"].tolist()),
    "namedtuple": (Pair(*stacked(SAMPLES)), lambda b: b.label.tolist()),
    "strings first": ((list("abcde"), stacked(SAMPLES)[0]), lambda b: ["abcde".index(c) for c in b[0]]),
    "two inputs": ((stacked(SAMPLES), torch.arange(SAMPLES)), lambda b: b[0][1].tolist()),
    "zip": (tuple(zip(*detection(SAMPLES), strict=True)), lambda b: numbers_of(b[0])),
    "zip, classes": (
        ([image(n) for n in range(SAMPLES)], list(range(SAMPLES))),
        lambda b: b[1],
    ),
    "images in a list, classes stacked": (
        {"images": [image(n) for n in range(SAMPLES)], "y": torch.arange(SAMPLES)},
        lambda b: b["y"].tolist(),
    ),
    "rows": (detection(SAMPLES), lambda b: numbers_of(row[0] for row in b)),
    "rows, classes": ([(image(n), n) for n in range(SAMPLES)], lambda b: [row[1] for row in b]),
    "rows of dicts": (
        [{"image": image(n), "id": n} for n in range(SAMPLES)],
        lambda b: [row["id"] for row in b],
    ),
    "rows of dicts, tensors alone": (
        [{"image": image(n), **target(n)} for n in range(SAMPLES)],
        lambda b: numbers_of(row["image"] for row in b),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_a_batch_by_samples(kind: str, world: int) -> None:
    batch, numbers = KINDS[kind]
    shares = []
    for rank in range(world):
        loader = UserDataLoader(Ready(batch), accumulate=1, seed=0, rank=rank, world=world)
        (micro,) = loader.stream(epoch=0, position=0, epochs=1)
        assert type(micro.data) is type(batch)
        assert len(numbers(micro.data)) == micro.size
        assert micro.total == count_samples(batch) == SAMPLES
        shares.append(numbers(micro.data))
    assert [number for share in shares for number in share] == list(range(SAMPLES))
    assert all(shares)


def test_images_and_their_targets_stay_together_and_whole() -> None:
    images, targets = slice_samples(tuple(zip(*detection(4), strict=True)), slice(2, 4))
    assert [tuple(i.shape) for i in images] == [(3, 4, 6), (3, 4, 7)]
    torch.testing.assert_close(targets, (target(2), target(3)))


def test_what_is_not_per_sample_stays_whole() -> None:
    weights = torch.ones(7)
    x, y, kept, number = slice_samples((*stacked(5), weights, 0.5), slice(1, 3))
    assert (len(x), len(y), len(kept), number) == (2, 2, 7, 0.5)


def test_what_could_mean_either_is_refused_where_it_matters() -> None:
    """Eight images to eight images: or eight inputs and eight outputs for three samples."""
    batch = ([torch.ones(3, 4, 4)] * 8, [torch.ones(3, 4, 4)] * 8)
    assert count_samples(batch) == 3
    with pytest.raises(InputError, match=r"cannot be shared by several processes(.|\n)*Stack them"):
        slice_samples(batch, slice(0, 2))
    halves = slice_samples(batch, slice(0, 2), stacked=True)
    assert [tuple(t.shape) for half in halves for t in half] == [(2, 4, 4)] * 16


@pytest.mark.timeout(60)
@pytest.mark.parametrize("batch", ["text", ["a", "b"], {"x": "text"}, 3, [], {}, UserDict(x=["a"])])
def test_a_batch_without_a_tensor_is_refused(batch: Any) -> None:
    with pytest.raises(InputError, match="without a tensor"):
        count_samples(batch)


def test_a_user_dict_keeps_its_type_on_the_way_from_a_worker() -> None:
    batch = UserDict(x=torch.ones(2), y=["a", "b"])
    got = received(to_send(batch, workers=1))
    assert type(got) is UserDict
    assert got["y"] == ["a", "b"]
    assert torch.equal(got["x"], batch["x"])


def shares(loader: DataLoader[Any], world: int = 2) -> list[list[Any]]:
    """Of each rank the data of its batches."""
    found = []
    for rank in range(world):
        stream = UserDataLoader(loader, accumulate=1, seed=0, rank=rank, world=world)
        found.append([micro.data for micro in stream.stream(epoch=0, position=0, epochs=1)])
    return found


def listed(samples: list[Any]) -> list[Any]:
    return samples


@pytest.mark.parametrize("side", [0, 1])
def test_a_list_of_image_tensors_is_shared_by_samples(side: int) -> None:
    """Seven images of three channels, of one size or of several, in batches of 4: the last one has three."""
    images = [torch.full((3, 5, 5 + side * n), float(n)) for n in range(7)]
    loader: DataLoader[Any] = DataLoader(images, batch_size=4, collate_fn=listed)  # type: ignore[arg-type]
    first, second = shares(loader)
    assert [numbers_of(batch) for batch in first] == [[0, 1], [4, 5]]
    assert [numbers_of(batch) for batch in second] == [[2, 3], [6]]
    whole = UserDataLoader(loader, accumulate=2, seed=0)
    sizes = [(m.size, m.total) for m in whole.stream(epoch=0, position=0, epochs=1)]
    assert sizes == [(4, 7), (3, 7)]


def test_as_many_images_as_channels_are_refused() -> None:
    loader: DataLoader[Any] = DataLoader(torch.zeros(8, 4, 5, 5), batch_size=4, collate_fn=listed)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot be shared by several processes"):
        shares(loader)


def pair_of(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = torch.stack(rows)
    return tokens[:, :-1], tokens[:, 1:]


@pytest.mark.parametrize("batch_size", [2, 4])
def test_two_tensors_of_all_samples_are_cut_by_samples(batch_size: int) -> None:
    """Also where the batch has as many samples as tensors."""
    rows = torch.arange(6)[:, None].expand(6, 9)
    loader: DataLoader[Any] = DataLoader(rows, batch_size=batch_size, collate_fn=pair_of)  # type: ignore[arg-type]
    first, second = shares(loader)
    for (x, y), (x_other, y_other), number in zip(first, second, range(9), strict=False):
        got = [*x[:, 0].tolist(), *x_other[:, 0].tolist()]
        assert got == list(range(number * batch_size, min(6, (number + 1) * batch_size)))
        assert x.shape == y.shape
        assert x_other.shape == y_other.shape


@pytest.mark.parametrize(
    ("batch", "expected", "listed"),
    [
        ([torch.zeros(3, 5, 5)] * 4, 4, True),
        ([torch.zeros(4, 5, 5)] * 4, 4, None),
        ([torch.zeros(3, 5, 5), torch.zeros(3, 6, 5)], 2, True),
        ([torch.zeros(2, 4), torch.zeros(5, 4)], 2, True),  # boxes
        ([torch.tensor(1.0)] * 3, 3, True),
        ([torch.zeros(2, 9), torch.zeros(2, 9)], 2, False),  # tokens and targets
        ([torch.zeros(6, 9), torch.zeros(6, 4)], 2, False),  # three rows of each sample
        ([torch.zeros(2, 3, 5, 5), torch.zeros(2, 3, 5, 5)], 2, False),  # two views
        ([torch.zeros(2, 3, 5, 5), torch.zeros(2)], 2, False),
        ([torch.zeros(4, 3, 5, 5), torch.zeros(4)], 4, False),
        (torch.zeros(2, 3), 2, False),
        (["a", "b"], 2, False),
    ],
)
def test_which_lists_hold_a_tensor_per_sample(batch: Any, expected: int, listed: Any) -> None:
    assert is_tensor_per_sample(batch, expected) is listed


def test_a_batch_with_a_sparse_tensor_has_room() -> None:
    """It has no nbytes."""
    assert has_room((torch.eye(3).to_sparse(), np.zeros(3)), workers=2)
