import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, lr_scheduler

from flambeau.recipes.training.cyclic_schedules import (
    cosine_restarts,
    one_cycle,
    one_cycle_momentum,
)
from flambeau.recipes.training.schedules import cosine


def sgd(momentum: float = 0.9) -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=momentum)


@pytest.mark.parametrize(
    ("first", "multiplier", "cycles"), [(10, 1, 4), (4, 2, 3), (1, 3, 4), (7, 1, 1)]
)
@pytest.mark.parametrize("end", [0.0, 0.1])
def test_restarts_equal_torch(first: int, multiplier: int, cycles: int, end: float) -> None:
    peer = sgd()
    scheduler = lr_scheduler.CosineAnnealingWarmRestarts(
        peer, T_0=first, T_mult=multiplier, eta_min=end
    )
    total = sum(first * multiplier**k for k in range(cycles))
    for step in range(total):
        mine = cosine_restarts(
            step, total_steps=total, cycles=cycles, cycle_multiplier=multiplier, end=end
        )
        assert mine == pytest.approx(peer.param_groups[0]["lr"], rel=1e-9, abs=1e-15)
        peer.step()
        scheduler.step()
    for step in (total, total + 1, 10 * total):  # torch would begin one more cycle
        assert cosine_restarts(step, total_steps=total, cycles=cycles, end=end) == end


def test_warmup_comes_before_the_first_cycle_only() -> None:
    values = [cosine_restarts(s, total_steps=23, cycles=2, warmup_steps=3) for s in range(23)]
    assert values[:4] == [0.25, 0.5, 0.75, 1.0]
    assert values[13] == 1.0  # the restart, at once
    assert values[3:13] == pytest.approx(values[13:])
    assert max(values) == 1.0
    assert min(values) > 0


@pytest.mark.parametrize("total", [7, 8, 50, 101])
def test_cycles_of_odd_lengths_all_begin_and_the_last_ends_with_the_run(total: int) -> None:
    values = [
        cosine_restarts(s, total_steps=total, cycles=3, cycle_multiplier=2)
        for s in range(total + 1)
    ]
    assert values.count(1.0) == 3
    lengths = [b - a for a, b in zip(tops(values), [*tops(values)[1:], total], strict=True)]
    assert lengths == pytest.approx([total / 7, 2 * total / 7, 4 * total / 7], abs=1.0)
    assert values[-1] == 0.0


def tops(values: list[float]) -> list[int]:
    return [step for step, value in enumerate(values) if value == 1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": -1}, "got -1, 10 and 0"),
        ({"total_steps": 0}, "got 0, 0 and 0"),
        ({"warmup_steps": 11}, "got 0, 10 and 11"),
        ({"cycles": 0}, "got 0, 1.0 and 0.0"),
        ({"cycle_multiplier": 0.5}, "got 2, 0.5 and 0.0"),
        ({"end": -0.1}, "got 2, 1.0 and -0.1"),
        ({"cycles": 3, "warmup_steps": 8}, "2 steps after the warm-up are too few for 3 cycles"),
    ],
)
def test_restarts_refuse(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosine_restarts(**{"step": 0, "total_steps": 10, "cycles": 2, **settings})


# ---------------------------------------------------------------- 1cycle


@pytest.mark.parametrize("three_phases", [False, True])
@pytest.mark.parametrize("shape", ["cosine", "linear"])
@pytest.mark.parametrize(("total", "rise"), [(100, 0.3), (37, 0.21), (10, 0.4), (500, 0.45)])
def test_one_cycle_equals_torch(total: int, rise: float, shape: Any, three_phases: bool) -> None:
    peer = sgd()
    scheduler = lr_scheduler.OneCycleLR(
        peer, max_lr=2.0, total_steps=total, pct_start=rise, three_phase=three_phases,
        anneal_strategy={"cosine": "cos", "linear": "linear"}[shape],  # type: ignore[arg-type]
    )  # fmt: skip
    for step in range(total):
        settings: dict[str, Any] = {
            "total_steps": total, "rise": rise, "shape": shape, "three_phases": three_phases,
        }  # fmt: skip
        (group,) = peer.param_groups
        assert 2 * one_cycle(step, **settings) == pytest.approx(group["lr"], rel=1e-9)
        assert one_cycle_momentum(step, **settings) == pytest.approx(group["momentum"], rel=1e-9)
        if step < total - 1:  # torch raises beyond
            peer.step()
            scheduler.step()
    last = one_cycle(total - 1, **settings)
    assert last == pytest.approx(1 / 250_000, rel=1e-6)
    assert one_cycle(total, **settings) == one_cycle(10 * total, **settings) == last


def test_betas_of_adam_equal_torch() -> None:
    peer = Adam([torch.nn.Parameter(torch.zeros(1))])
    scheduler = lr_scheduler.OneCycleLR(
        peer, max_lr=1.0, total_steps=20, div_factor=10, final_div_factor=100, base_momentum=0.8
    )
    for step in range(20):
        (group,) = peer.param_groups
        mine = one_cycle(step, total_steps=20, start=0.1, end=0.001)
        assert mine == pytest.approx(group["lr"], rel=1e-9)
        momentum = one_cycle_momentum(step, total_steps=20, low=0.8)
        assert momentum == pytest.approx(group["betas"][0], rel=1e-9)
        if step < 19:
            peer.step()
            scheduler.step()


def test_a_rise_of_one_step_starts_at_the_peak() -> None:
    assert [one_cycle(s, total_steps=3, rise=1 / 3, shape="linear", end=0.0) for s in range(3)] == [
        1.0, 0.5, 0.0,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rise": 0.05}, "rise = 0.05 of 10 steps.*from 0.1 to below 1"),
        ({"rise": 1.0}, "to below 1"),
        ({"rise": 0.5 + 0.1, "three_phases": True}, "below 0.5"),
        ({"total_steps": 1}, "of 1 steps"),
        ({"total_steps": 0}, "of 0 steps"),
        ({"shape": "cos"}, "got 'cos'"),
        ({"step": -1}, "got -1"),
    ],
)
@pytest.mark.parametrize("schedule", [one_cycle, one_cycle_momentum])
def test_one_cycle_refuses(
    schedule: Callable[..., float], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(**{"step": 0, "total_steps": 10, **settings})


def test_ends_of_one_cycle_are_refused() -> None:
    for settings in ({"start": 0.0}, {"start": 1.1}, {"end": -1.0}):
        with pytest.raises(ValueError, match=r"start must be in \(0, 1\]"):
            one_cycle(0, total_steps=10, **settings)
    for settings in ({"low": -0.1}, {"high": 1.0}, {"low": 0.9, "high": 0.8}):
        with pytest.raises(ValueError, match="low <= high < 1"):
            one_cycle_momentum(0, total_steps=10, **settings)


@pytest.mark.parametrize("end", [math.inf, math.nan])
def test_an_end_that_is_not_finite_is_refused(end: float) -> None:
    """It gave NaN, or an infinite rate at the end of a run."""
    with pytest.raises(ValueError, match="end at least 0 and finite"):
        cosine_restarts(0, total_steps=4, cycles=1, end=end)
    with pytest.raises(ValueError, match="end at least 0 and finite"):
        one_cycle(0, total_steps=4, end=end)
    with pytest.raises(ValueError, match="end must be at least 0 and finite"):
        cosine(0, total_steps=4, end=end)
