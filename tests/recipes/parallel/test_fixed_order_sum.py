"""Gradients of parts, against the same parts on one process and against a sum written out by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn

from flambeau.recipes.parallel.fixed_order_sum import FixedOrderSum

StartRanks = Callable[..., Any]


class Sometimes(nn.Module):
    """Three layers; the last is left out of odd parts, the first of all."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.unused, self.first, self.second = (nn.Linear(7, 7, dtype=dtype) for _ in range(3))
        self.frozen = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator))

    def forward(self, x: Tensor, part: int) -> Tensor:
        x = self.first(x).tanh()
        return x if part % 2 else self.second(x)


def gradients_of_part(model: nn.Module, part: int, step: int) -> None:
    """Backward of a part, whose gradients are of another size than those of the others."""
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(100 * step + part)
    x = torch.randn(5, 7, generator=generator).to(dtype)
    (model(x, part).square().mean() * 10 ** (part % 3)).backward()


def trained(
    parts: int, dtype: torch.dtype = torch.float32, early: bool = False, bucket_bytes: int = 1
) -> list[Tensor | None]:
    """The gradients after each of three steps, the last one with one part less."""
    model = Sometimes(dtype)
    tree = FixedOrderSum(model.parameters(), parts=parts, bucket_bytes=bucket_bytes)
    found: list[Tensor | None] = []
    for step in range(3):
        of_step = parts - (step == 2 and parts > 1)
        for part in tree.local_parts:
            if part < of_step:
                if early and part == min(tree.local_parts.stop, of_step) - 1:
                    tree.expect_last(parts=of_step)
                gradients_of_part(model, part, step)
                tree.take()
        tree.give(parts=of_step)
        found += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
    return found


def are_equal(left: list[Tensor | None], right: list[Tensor | None]) -> bool:
    return len(left) == len(right) and all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    ("world", "parts"), [(2, 2), (2, 4), (2, 5), (3, 4), (3, 8), (4, 4), (4, 7), (4, 2)]
)
def test_any_number_of_processes_gives_the_bits_of_one(
    start_ranks: StartRanks, world: int, parts: int
) -> None:
    alone = trained(parts)
    for early, bucket_bytes in ((False, 10**6), (True, 10**6), (True, 150)):
        job = start_ranks(world, trained, parts, torch.float32, early, bucket_bytes, group=True)
        assert all(are_equal(alone, found) for found in job.results())


def sent_in_passes(layers: nn.Module, x: Tensor) -> list[int]:
    """How many of the buckets were sent within the last pass of each of three batches."""
    tree, found = FixedOrderSum(layers.parameters(), parts=4, bucket_bytes=1), []
    for _ in range(3):
        for part in tree.local_parts:
            if part == tree.local_parts[-1]:
                tree.expect_last()
            layers(x * (part + 1)).sum().backward()
            if part == tree.local_parts[-1]:
                found.append(tree._num_sent)
            tree.take()
        tree.give()
        for p in layers.parameters():
            p.grad = None
    return found


class Reentrant(nn.Module):
    """One layer, recomputed twice: its gradients come in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True)
        return x


def test_one_in_pieces_is_found_beside_one_that_never_comes() -> None:
    model = Reentrant()
    model.unused = nn.Linear(3, 3)
    tree = FixedOrderSum(model.parameters(), parts=2)
    for _ in range(2):
        for part in tree.local_parts:
            if part == tree.local_parts[-1]:
                tree.expect_last()
            model(torch.ones(2, 3)).sum().backward()
            tree.take()
            assert model.layer.weight.grad is None
        tree.give()
        model.zero_grad()


def sums_of(model: nn.Module, alone_in: int = -1) -> tuple[list[Tensor], list[bool]]:
    """The gradients of three batches of four parts; and of each own part, whether autograd adds to them.

    In batch `alone_in` each part is taken alone.
    """
    tree, found, held = FixedOrderSum(model.parameters(), parts=4, bucket_bytes=1), [], []
    for batch in range(3):
        for part in tree.local_parts:
            if part == tree.local_parts[-1] and batch != alone_in:
                tree.expect_last()
            generator = torch.Generator().manual_seed(10 * batch + part)
            model(torch.randn(5, 3, generator=generator)).tanh().sum().backward()
            tree.take(alone=batch == alone_in)
            held.append(next(model.parameters()).grad is not None)
        tree.give()
        for p in model.parameters():
            assert p.grad is not None
            found.append(p.grad.clone())
            p.grad = None
    return found, held


@pytest.mark.parametrize("kind", ["whole", "reentrant"])
def test_autograd_adds_neighbours_where_gradients_come_whole(
    start_ranks: StartRanks, kind: str
) -> None:
    torch.manual_seed(0)
    model = Reentrant() if kind == "reentrant" else nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    alone, held = sums_of(model)
    adds = kind == "whole"
    assert held == [False] * 4 + [adds, False] * 4
    for world in (2, 3, 4):
        for found, held in start_ranks(world, sums_of, model, group=True).results():
            assert are_equal(alone, found)
            assert any(held) == (adds and len(held) == 6)
        for found, held in start_ranks(world, sums_of, model, 1, group=True).results():
            assert are_equal(alone, found)
            assert not any(held[len(held) // 3 : len(held) // 3 * 2])


def test_what_a_pass_finishes_is_sent_while_it_runs(start_ranks: StartRanks) -> None:
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    found = start_ranks(3, sent_in_passes, layers, torch.ones(2, 3), group=True).results()
    assert found == 3 * [[0, 4, 4]]
    found = start_ranks(2, sent_in_passes, Reentrant(), torch.ones(2, 3), group=True).results()
    assert found == 2 * [[0, 0, 0]]


def two_passes() -> None:
    layer = nn.Linear(3, 3)
    tree = FixedOrderSum(layer.parameters(), parts=2, bucket_bytes=1)
    for passes in (1, 2):
        tree.expect_last()
        for _ in range(passes):
            layer(torch.ones(3)).sum().backward()
        if passes == 1:
            tree.take()
            tree.give()
            layer.zero_grad()
    with pytest.raises(RuntimeError, match="got another gradient after its sum was sent"):
        tree.take()


def told_two_numbers() -> None:
    layer = nn.Linear(3, 3)
    tree = FixedOrderSum(layer.parameters(), parts=4, bucket_bytes=1)
    for batch in range(2):
        for part in tree.local_parts[: 1 if batch else None]:
            if part == tree.local_parts[-1] or batch:
                tree.expect_last()
            layer(torch.ones(3)).sum().backward()
            tree.take()
        if batch:
            with pytest.raises(
                RuntimeError, match="expect_last was called with another number of parts"
            ):
                tree.give(parts=3 if tree.local_parts.start else 1)
        else:
            tree.give()
            layer.zero_grad()


def test_two_numbers_of_parts_for_one_batch_are_an_error(start_ranks: StartRanks) -> None:
    start_ranks(2, told_two_numbers, group=True).results()


def test_a_gradient_that_comes_too_late_is_an_error(start_ranks: StartRanks) -> None:
    start_ranks(2, two_passes, group=True).results()


def test_bfloat16_too(start_ranks: StartRanks) -> None:
    alone = trained(4, torch.bfloat16)
    for found in start_ranks(3, trained, 4, torch.bfloat16, group=True).results():
        assert are_equal(alone, found)


def test_the_order_is_that_of_a_tree_with_the_last_ones_first_where_parts_are_left() -> None:
    leaf = nn.Parameter(torch.zeros(200))
    parts = torch.randn(7, 200, generator=torch.Generator().manual_seed(0))
    parts *= torch.tensor([1e-3, 1e3, 1.0, 1e5, 1e-2, 1e4, 10.0])[:, None]
    tree = FixedOrderSum([leaf], parts=7)
    for part in tree.local_parts:
        leaf.grad = parts[part].clone()
        tree.take()
    tree.give()
    p = parts
    expected = ((p[0] + p[1]) + (p[2] + p[3])) + ((p[4] + p[5]) + p[6])
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected)
    assert not torch.equal(leaf.grad, p.sum(0))


def test_no_more_gradients_are_held_than_levels_of_the_tree() -> None:
    leaf = nn.Parameter(torch.zeros(3))
    tree, most = FixedOrderSum([leaf], parts=64), 0
    for _ in tree.local_parts:
        leaf.grad = torch.ones(3)
        tree.take()
        most = max(most, len(tree._buckets[0].tree.sums))
    assert most == 6
    tree.give()
    assert torch.equal(leaf.grad, torch.full((3,), 64.0))


def channels_last_sum() -> Tensor:
    layer = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    tree = FixedOrderSum(layer.parameters(), parts=2)
    for part in tree.local_parts:
        layer(torch.full((1, 3, 5, 5), part + 1.0)).sum().backward()
        tree.take()
    tree.give()
    grad = layer.weight.grad
    assert grad is not None
    assert grad.is_contiguous(memory_format=torch.channels_last)
    assert grad.data_ptr() % 64 == 0
    return grad


def test_gradients_lie_as_autograd_lays_them(start_ranks: StartRanks) -> None:
    alone = channels_last_sum()
    assert torch.equal(alone, torch.full_like(alone, 27.0))
    for found in start_ranks(2, channels_last_sum, group=True).results():
        assert torch.equal(found, alone)


def of_a_subgroup() -> list[float]:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    leaf = nn.Parameter(torch.zeros(1))
    mine = groups[dist.get_rank() // 2]
    tree = FixedOrderSum([leaf], parts=4, group=mine)
    for part in tree.local_parts:
        leaf.grad = torch.tensor([10.0**part])
        tree.take()
    tree.give()
    assert leaf.grad is not None
    return [*tree.local_parts, leaf.grad.item()]


def test_a_group_of_some_processes_adds_apart_from_the_others(start_ranks: StartRanks) -> None:
    assert start_ranks(3, of_a_subgroup, group=True).results() == [
        [0, 1, 1111.0], [2, 3, 1111.0], [0, 1, 2, 3, 1111.0],
    ]  # fmt: skip


def test_a_forgotten_part_is_an_error() -> None:
    leaf = nn.Parameter(torch.zeros(1))
    tree = FixedOrderSum([leaf], parts=2)
    leaf.grad = torch.ones(1)
    tree.take()
    with pytest.raises(RuntimeError, match="gradients of 1 parts were taken, and 2 of the 2 parts"):
        tree.give()


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [([], 2), ([torch.zeros(2)], 2), ([nn.Parameter(torch.zeros(2))], 0),
     ([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))], 2)],
)  # fmt: skip
def test_what_cannot_be_added_is_refused(tensors: list[Tensor], parts: int) -> None:
    with pytest.raises(ValueError, match="parameters of one dtype and at least one part"):
        FixedOrderSum(tensors, parts=parts)


@pytest.mark.parametrize("parts", [-1, 0, 3])
def test_another_number_of_parts_than_a_batch_may_have_is_refused(parts: int) -> None:
    """None gave an IndexError, and too many passed for a whole batch."""
    leaf = nn.Parameter(torch.zeros(1))
    tree = FixedOrderSum([leaf], parts=2)
    for call in (tree.give, tree.send, tree.expect_last):
        with pytest.raises(ValueError, match=f"a batch has 1 to 2 parts, got parts={parts}"):
            call(parts=parts)
    for _ in tree.local_parts:
        leaf.grad = torch.ones(1)
        tree.take()
    tree.give(parts=2)
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0]
