from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, lr_scheduler

from flambeau.recipes.training.chained_schedules import chain, piecewise_linear, with_warmup


def half(step: int) -> float:
    return 0.5 ** (step / 4)


def test_chain_equals_torch() -> None:
    """SequentialLR of three schedulers of torch, against the same three as functions."""
    peer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.SequentialLR(
        peer,
        [
            lr_scheduler.LinearLR(peer, start_factor=0.2, total_iters=4),
            lr_scheduler.ConstantLR(peer, factor=1.0),
            lr_scheduler.ExponentialLR(peer, gamma=0.5),
        ],
        milestones=[4, 9],
    )
    mine = chain(
        [(4, lambda step: 0.2 + 0.2 * step), (5, lambda step: 1.0)], lambda step: 0.5**step
    )
    for step in range(20):
        assert mine(step) == pytest.approx(peer.param_groups[0]["lr"], rel=1e-9)
        peer.step()
        scheduler.step()


def test_each_piece_counts_from_its_own_border() -> None:
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[int], float]:
        return lambda step: seen.append((name, step)) or 0.0  # type: ignore[func-returns-value]

    mine = chain([(2, note("a")), (1, note("b"))], note("c"))
    for step in (0, 1, 2, 3, 4, 1000):
        mine(step)
    assert seen == [("a", 0), ("a", 1), ("b", 0), ("c", 0), ("c", 1), ("c", 997)]


@pytest.mark.parametrize("warmup", [1, 5])
def test_warmup_before_anything(warmup: int) -> None:
    """SCH-06: above 0 from the first step, equal increments, and no growth after it."""
    mine = with_warmup(lambda step: 0.8 * half(step), warmup_steps=warmup)
    values = [mine(step) for step in range(30)]
    assert values[:warmup] == pytest.approx([0.8 * (k + 1) / (warmup + 1) for k in range(warmup)])
    assert values[warmup:] == [0.8 * half(step) for step in range(30 - warmup)]
    assert min(values) > 0
    assert max(values) == values[warmup] == 0.8


def test_no_warmup_is_the_schedule_itself() -> None:
    mine = with_warmup(half, warmup_steps=0)
    assert [mine(step) for step in range(9)] == [half(step) for step in range(9)]


def test_the_note_of_the_cookbook_is_wrong() -> None:
    """SCH-06 in its two orders: it keeps growing, or its first epoch has no rate at all."""
    peer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = lr_scheduler.LambdaLR(peer, lambda t: t / 10)
    rates = []
    for _ in range(14):
        rates.append(peer.param_groups[0]["lr"])
        peer.step()
        scheduler.step()
    assert rates[0] == 0.0
    assert rates[13] == pytest.approx(1.3)


def test_a_warmup_within_a_chain() -> None:
    again = with_warmup(half, warmup_steps=2)
    mine = chain([(4, again)], again)
    assert [mine(step) for step in range(4)] == [mine(step) for step in range(4, 8)]


POINTS = [(2, 0.1), (5, 1.0), (6, 0.25), (20, 0.0)]


def test_piecewise_linear_equals_numpy() -> None:
    steps, values = zip(*POINTS, strict=True)
    for step in range(30):
        wanted = float(np.interp(step, steps, values))
        assert piecewise_linear(step, points=POINTS) == pytest.approx(wanted, rel=1e-12)
    assert piecewise_linear(7, points=[(3, 0.5)]) == 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chain([(3, half), (0, half)], half), r"at least one step, got \[3, 0\]"),
        (lambda: chain([], half)(-1), "at least 0, got -1"),
        (lambda: with_warmup(half, warmup_steps=-1), "at least 0, got -1"),
        (lambda: with_warmup(half, warmup_steps=3)(-1), "at least 0, got -1"),
        (lambda: piecewise_linear(-1, points=POINTS), "at least 0, got -1"),
        (lambda: piecewise_linear(0, points=[]), r"got \[\]"),
        (lambda: piecewise_linear(0, points=[(3, 1.0), (3, 0.5)]), "rising steps"),
        (lambda: piecewise_linear(0, points=[(3, -1.0)]), "none negative"),
    ],
)
def test_refuses(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
