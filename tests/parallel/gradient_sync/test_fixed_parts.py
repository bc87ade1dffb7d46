"""Steps in parts: the bits of one process on several, and BatchNorm as torch updates it, part after part."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flambeau.data.loading.batch_layout import FixedPartsLayout
from flambeau.data.loading.batch_plan import BatchPart, BatchPlan
from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.fixed_parts import FixedParts
from flambeau.parallel.ranks import Ranks
from flambeau.recipes.parallel.sync_batchnorm import SyncBatchNorm

StartRanks = Callable[..., Any]
IMAGES = torch.randn(22, 3, 6, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(22) % 5


class Twice(nn.Module):
    """A BatchNorm that is called twice, a frozen one, dropout, and one with a momentum of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3)
        self.norm, self.frozen = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.late = nn.BatchNorm1d(4, momentum=0.3)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.frozen.eval()
        x = self.norm(self.first(x)).relu()
        x = self.norm(self.frozen(self.second(x))).relu().mean((2, 3))
        return self.head(nn.functional.dropout(self.late(x), 0.2))


def micro_of(part: BatchPart) -> MicroBatch:
    cut = part.cut
    indices = part.indices[cut.local]
    size = 0 if cut.is_stand_in else len(indices)
    return MicroBatch(
        (IMAGES[indices], TARGETS[indices]), part.indices, size, part.total, cut.part, cut.ends_batch,
        False, cut.position, (), cut.all_have, cut.draw, cut.local, cut.dealt,
    )  # fmt: skip


def trained(parts: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The state after two epochs, each of three steps, the last of them with fewer samples and parts."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = Twice().to(dtype)
    sync = FixedParts(
        model, Ranks(rank, world, dist.group.WORLD if world > 1 else None), parts=parts
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = BatchPlan(
        FixedPartsLayout(8, parts, rank, world), lambda epoch: np.arange(22), repeats=False,
        length=22, epoch=0, position=0, epochs=2,
    )  # fmt: skip
    for micro in map(micro_of, plan):
        sync.before_batch(micro)
        torch.manual_seed(micro.draw)
        images, targets = micro.data
        (cross_entropy(model(images.to(dtype)), targets) * (micro.size / micro.total)).backward()
        sync.after_part()
        if micro.ends_batch:
            sync.after_backward()
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(("world", "parts"), [(2, 4), (3, 4), (4, 4), (3, 2), (2, 1)])
def test_several_processes_have_the_bits_of_one(
    start_ranks: StartRanks, world: int, parts: int
) -> None:
    alone = trained(parts)
    for found in start_ranks(world, trained, parts, group=True).results():
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.equal(found[name], value), name


def test_statistics_are_those_of_one_part_after_another() -> None:
    found = trained(4, torch.float64)
    model = Twice().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = BatchPlan(
        FixedPartsLayout(8, 4), lambda epoch: np.arange(22), repeats=False, length=22, epoch=0,
        position=0, epochs=2,
    )  # fmt: skip
    for micro in map(micro_of, plan):
        torch.manual_seed(micro.draw)
        images, targets = micro.data
        (cross_entropy(model(images.double()), targets) * (micro.size / micro.total)).backward()
        if micro.ends_batch:
            optimizer.step()
            optimizer.zero_grad()
    expected = model.state_dict()
    assert expected["norm.num_batches_tracked"] == 2 * 2 * (4 + 4 + 3)
    torch.testing.assert_close(found, dict(expected), rtol=1e-10, atol=1e-12)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.layer(x)


def test_a_buffer_that_the_forward_pass_writes_is_refused() -> None:
    model = Counting()
    sync = FixedParts(model, Ranks(0, 1, None), parts=2)
    plan = BatchPlan(
        FixedPartsLayout(4, 2), lambda epoch: np.arange(4), repeats=False, length=4, epoch=0,
        position=0, epochs=1,
    )  # fmt: skip
    sync.before_batch(micro_of(next(iter(plan))))
    model(torch.ones(2, 2)).sum().backward()
    with pytest.raises(InputError, match=r"parts = 2: .* writes the buffer 'seen'"):
        sync.after_part()


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), "'1' is torch's SyncBatchNorm"),
        (nn.Sequential(nn.BatchNorm1d(2), SyncBatchNorm(2)), "'0' is a BatchNorm of one part, and others"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)), "'1' has momentum=None"),
        (nn.Flatten(), "no parameter that is trained"),
    ],
)  # fmt: skip
def test_what_depends_on_more_than_one_part_is_refused(model: nn.Module, what: str) -> None:
    with pytest.raises(InputError, match=what):
        FixedParts(model, Ranks(0, 1, None), parts=2)


def test_layers_that_share_statistics_with_some_ranks_are_refused(start_ranks: StartRanks) -> None:
    def work() -> str:
        layer = SyncBatchNorm(2, process_group=dist.new_group([0, 1]))
        dist.barrier()  # else rank 0, which has the store, may end while the other makes its group
        with pytest.raises(InputError) as caught:
            FixedParts(nn.Sequential(layer), Ranks(dist.get_rank(), 2, dist.group.WORLD), parts=2)
        return str(caught.value)

    for said in start_ranks(2, work, group=True).results():
        assert said.startswith("'0' has a process_group")


def test_layers_that_share_statistics_are_batchnorm_outside_of_steps() -> None:
    layer, plain = SyncBatchNorm(3), nn.BatchNorm2d(3)
    FixedParts(nn.Sequential(layer), Ranks(0, 1, None), parts=2)
    images = IMAGES[:8]
    torch.testing.assert_close(layer(images), plain(images))
    torch.testing.assert_close(layer.running_var, plain.running_var)
