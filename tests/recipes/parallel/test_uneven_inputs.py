from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from flambeau.recipes.parallel.uneven_inputs import even_steps
from flambeau.recipes.training.accumulation import accumulate_gradients

SIZES = [[4, 3, 5], [2], [6, 1]]  # of the batches of three ranks


def problem() -> tuple[nn.Module, list[list[tuple[Tensor, Tensor]]]]:
    """A model, and the batches of each rank."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        batches = [
            [(torch.randn(n, 3, dtype=torch.float64), torch.randint(3, (n,))) for n in sizes]
            for sizes in SIZES
        ]
    return model, batches


def copies(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train_alone() -> list[list[Tensor]]:
    """On the mean loss of all ranks' samples; the weights after each step."""
    model, batches = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    history = []
    for step in range(max(map(len, SIZES))):
        parts = [theirs[step] for theirs in batches if step < len(theirs)]
        x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        history.append(copies(model))
    return history


def train_on_ranks(*, accumulate: bool) -> tuple[list[list[Tensor]], list[float]]:
    model, batches = problem()
    here = dist.get_rank()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    history, weights = [], []
    for (x, y), weight in even_steps(iter(batches[here]), SIZES[here]):
        optimizer.zero_grad()
        if accumulate:
            accumulate_gradients(
                lambda x, y: F.cross_entropy(ddp(x), y), [x, y],
                micro_batch_size=2, scale=weight, no_sync=ddp.no_sync,
            )  # fmt: skip
        else:
            (F.cross_entropy(ddp(x), y) * weight).backward()
        optimizer.step()
        history.append(copies(model))
        weights.append(weight)
    return history, weights


@pytest.mark.parametrize("accumulate", [False, True])
def test_weights_are_those_of_one_process(accumulate: bool, start_ranks) -> None:
    expected = train_alone()
    found = start_ranks(3, lambda: train_on_ranks(accumulate=accumulate), group=True).results()
    for history, _ in found:
        assert len(history) == len(expected)
        torch.testing.assert_close(history, expected, rtol=1e-10, atol=1e-12)
    # 3 ranks times their samples over those of the step.
    assert found[0][1] == pytest.approx([3 * 4 / 12, 3 * 3 / 4, 3 * 5 / 5])
    assert found[1][1] == pytest.approx([3 * 2 / 12, 0, 0])
    assert found[2][1] == pytest.approx([3 * 6 / 12, 3 * 1 / 4, 0])


def test_the_last_batch_keeps_step(start_ranks) -> None:
    def rank() -> list[str]:
        names = ["a", "b", "c"][: len(SIZES[dist.get_rank()])]
        return [name for name, _ in even_steps(names, SIZES[dist.get_rank()])]

    assert start_ranks(3, rank, group=True).results() == [list("abc"), list("aaa"), list("abb")]


def test_in_a_group(start_ranks) -> None:
    def rank() -> list[tuple[str, float]]:
        here = dist.get_rank()
        group = dist.new_group([0, 2])
        sizes = [[3], [], [3, 3]][here]
        return list(even_steps("ab"[: len(sizes)], sizes, group=group)) if sizes else []

    first, second, third = start_ranks(3, rank, group=True).results()
    assert first == [("a", 1.0), ("a", 0.0)]
    assert second == []
    assert third == [("a", 1.0), ("b", 2.0)]


def test_alone() -> None:
    assert list(even_steps("abc", [4, 4, 1])) == [("a", 1.0), ("b", 1.0), ("c", 1.0)]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([4], r"rank 1 has 0 batches, the smallest of 0"),
        ([4, 0], "rank 0 has 2 batches, the smallest of 0"),
    ],
)
def test_a_rank_without_work_is_refused_on_all(
    sizes: Sequence[int], message: str, start_ranks
) -> None:
    def rank() -> float:
        mine = sizes if dist.get_rank() == 0 else []
        with pytest.raises(ValueError, match=message):
            next(even_steps(["a"] * len(mine), mine))
        total = torch.ones(())
        dist.all_reduce(total)  # the ranks are still in step
        return float(total)

    assert start_ranks(2, rank, group=True).results() == [2, 2]


@pytest.mark.parametrize(
    ("batches", "message"),
    [("a", "sizes name 2 batches, but there are only 1"), ("abc", "2 batches, but there are more")],
)
def test_sizes_that_do_not_fit_are_refused(batches: str, message: str) -> None:
    steps = even_steps(batches, [1, 1])
    assert next(steps) == ("a", 1.0)
    with pytest.raises(ValueError, match=message):
        list(steps)


def test_none_and_zero_are_batches() -> None:
    assert list(even_steps([None, 0], [1, 1])) == [(None, 1.0), (0, 1.0)]
