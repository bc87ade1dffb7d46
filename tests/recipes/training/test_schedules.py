import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, lr_scheduler

from flambeau.recipes.training.schedules import (
    constant,
    cosine,
    linear,
    linear_scaled_lr,
    multistep,
    set_lr,
)

BASE = 0.3
TOTAL = 50
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def optimizer(lr: float | torch.Tensor = BASE) -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates_of_torch(make: Callable[[Any], Any], warmup_steps: int) -> list[float]:
    """The rates of TOTAL steps, from torch's own schedulers, after a warm-up of LinearLR."""
    peer = optimizer()
    main = make(peer)
    if warmup_steps:
        peer = optimizer()
        warmup = lr_scheduler.LinearLR(
            peer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps
        )
        main = lr_scheduler.SequentialLR(peer, [warmup, make(peer)], milestones=[warmup_steps])
    rates = []
    for _ in range(TOTAL):
        rates.append(peer.param_groups[0]["lr"])
        peer.step()
        main.step()
    return rates


def rates_of(schedule: Callable[[int], float]) -> list[float]:
    mine = optimizer()
    rates = []
    for step in range(TOTAL):
        set_lr(mine, schedule(step))
        rates.append(mine.param_groups[0]["lr"])
        mine.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7, 49])
@pytest.mark.parametrize("end", [0.0, 0.1])
def test_cosine_equals_torch(warmup: int, end: float) -> None:
    theirs = rates_of_torch(
        lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=TOTAL - warmup, eta_min=end * BASE),
        warmup,
    )
    mine = rates_of(lambda step: cosine(step, total_steps=TOTAL, warmup_steps=warmup, end=end))
    assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("warmup", [0, 1, 7, 49])
@pytest.mark.parametrize("end", [0.0, 0.1, 2.0])
def test_linear_equals_torch(warmup: int, end: float) -> None:
    peer = lr_scheduler.PolynomialLR if end == 0 else lr_scheduler.LinearLR
    settings = {} if end == 0 else {"start_factor": 1.0, "end_factor": end}
    if end > 1:  # LinearLR takes no factor above 1: its start from a base twice as high
        settings = {"start_factor": 1 / end, "end_factor": 1.0}
    theirs = rates_of_torch(lambda o: peer(o, total_iters=TOTAL - warmup, **settings), warmup)
    mine = rates_of(lambda step: linear(step, total_steps=TOTAL, warmup_steps=warmup, end=end))
    if end > 1:
        mine, theirs = mine[warmup:], [rate * end for rate in theirs[warmup:]]
    assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("warmup", [0, 1, 7])
def test_multistep_equals_torch(warmup: int) -> None:
    theirs = rates_of_torch(
        lambda o: lr_scheduler.MultiStepLR(o, [20 - warmup, 45 - warmup], gamma=0.2), warmup
    )
    mine = rates_of(
        lambda step: multistep(
            step, total_steps=TOTAL, warmup_steps=warmup, milestones=[20, 45], gamma=0.2
        )
    )
    assert mine == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("warmup", [0, 1, 7, 50])
def test_constant_equals_torch(warmup: int) -> None:
    theirs = rates_of_torch(lambda o: lr_scheduler.ConstantLR(o, factor=1.0), warmup)
    mine = rates_of(lambda step: constant(step, total_steps=TOTAL, warmup_steps=warmup))
    assert mine == pytest.approx(theirs, rel=1e-9)


SCHEDULES: list[tuple[Callable[..., float], dict[str, Any], float]] = [
    (constant, {}, 1.0),
    (linear, {"end": 0.2}, 0.2),
    (cosine, {"end": 0.2}, 0.2),
    (multistep, {"milestones": [30, 40], "gamma": 0.5}, 0.25),
]


@pytest.mark.parametrize(("schedule", "settings", "end"), SCHEDULES)
def test_warmup_has_equal_increments_no_zero_and_no_jump(
    schedule: Callable[..., float], settings: dict[str, Any], end: float
) -> None:
    """SCH-06: the note's warm-up starts at 0 for an epoch, or keeps growing above 1."""
    values = [schedule(s, total_steps=TOTAL, warmup_steps=4, **settings) for s in range(TOTAL)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert min(values) > 0
    assert max(values) == 1.0
    assert all(type(value) is float for value in values)


@pytest.mark.parametrize(("schedule", "settings", "end"), SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 10, TOTAL])
def test_stays_at_the_end(
    schedule: Callable[..., float], settings: dict[str, Any], end: float, warmup: int
) -> None:
    if schedule is multistep and warmup == TOTAL:
        settings, end = {"milestones": []}, 1.0  # no place for a milestone
    for step in (TOTAL, TOTAL + 1, 10 * TOTAL):
        value = schedule(step, total_steps=TOTAL, warmup_steps=warmup, **settings)
        assert value == pytest.approx(end, abs=1e-15)


@pytest.mark.parametrize("schedule", [constant, linear, cosine])
def test_a_run_that_is_all_warmup(schedule: Callable[..., float]) -> None:
    values = [schedule(step, total_steps=3, warmup_steps=3) for step in range(3)]
    assert values == [0.25, 0.5, 0.75]
    assert multistep(2, total_steps=3, warmup_steps=3, milestones=[]) == 0.75


def test_a_run_of_one_step() -> None:
    assert cosine(0, total_steps=1) == linear(0, total_steps=1) == constant(0, total_steps=1) == 1.0


def test_a_milestone_takes_effect_at_its_step() -> None:
    values = [multistep(step, total_steps=4, milestones=[2]) for step in range(4)]
    assert values == pytest.approx([1.0, 1.0, 0.1, 0.1])


@pytest.mark.parametrize("schedule", [constant, linear, cosine])
@pytest.mark.parametrize(
    ("step", "total", "warmup"), [(-1, 10, 0), (0, 0, 0), (0, 10, -1), (0, 10, 11)]
)
def test_lengths_are_refused(
    schedule: Callable[..., float], step: int, total: int, warmup: int
) -> None:
    with pytest.raises(ValueError, match=f"got {step}, {total} and {warmup}"):
        schedule(step, total_steps=total, warmup_steps=warmup)


@pytest.mark.parametrize("schedule", [linear, cosine])
@pytest.mark.parametrize("end", [-0.1, math.nan])
def test_end_is_refused(schedule: Callable[..., float], end: float) -> None:
    with pytest.raises(ValueError, match=f"end must be at least 0, got {end}"):
        schedule(0, total_steps=10, end=end)


@pytest.mark.parametrize(
    ("milestones", "warmup"),
    [([10], 0), ([-1], 0), ([3, 3], 0), ([5, 3], 0), ([3], 4), ([0.5], 0)],
)
def test_milestones_are_refused(milestones: list[int], warmup: int) -> None:
    with pytest.raises(ValueError, match=rf"rising whole steps in \[{warmup}, 10\)"):
        multistep(0, total_steps=10, milestones=milestones, warmup_steps=warmup)


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.nan])
def test_gamma_is_refused(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma must be above 0"):
        multistep(0, total_steps=10, milestones=[3], gamma=gamma)


def test_multistep_checks_lengths_too() -> None:
    with pytest.raises(ValueError, match="got -1, 10 and 0"):
        multistep(-1, total_steps=10, milestones=[3])


# ---------------------------------------------------------------- linear scaling


def test_linear_scaling_of_the_paper() -> None:
    """Goyal et al., section 2.1 and table 1: 0.1 at 256, so 3.2 at 8192."""
    assert linear_scaled_lr(0.1, 8192) == pytest.approx(3.2)
    assert linear_scaled_lr(0.1, 256) == 0.1
    assert linear_scaled_lr(0.1, 64, reference_batch_size=128) == 0.05


@pytest.mark.parametrize(("lr", "batch", "reference"), [(0.0, 1, 1), (0.1, 0, 1), (0.1, 1, 0)])
def test_linear_scaling_refuses(lr: float, batch: int, reference: int) -> None:
    with pytest.raises(ValueError, match=f"must be above 0, got {lr}, {batch}, {reference}"):
        linear_scaled_lr(lr, batch, reference_batch_size=reference)


# ---------------------------------------------------------------- set_lr


def test_every_group_keeps_its_own_base_rate() -> None:
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    both = SGD([{"params": [a], "lr": 0.1}, {"params": [b]}], lr=1.0)
    for multiplier in (0.5, 0.25, 1.0, 0.5):
        set_lr(both, multiplier)
        assert [group["lr"] for group in both.param_groups] == [0.1 * multiplier, multiplier]


def test_base_rate_survives_a_checkpoint() -> None:
    first = optimizer()
    set_lr(first, 0.5)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = optimizer(lr=99.0)
    second.load_state_dict(torch.load(file, weights_only=True))
    set_lr(second, 0.1)
    assert second.param_groups[0]["lr"] == pytest.approx(0.1 * BASE)


def test_step_uses_the_rate_that_was_set() -> None:
    mine = optimizer(lr=1.0)
    (weight,) = mine.param_groups[0]["params"]
    weight.grad = torch.ones(1)
    set_lr(mine, 0.25)
    mine.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.25]), rtol=0, atol=0)


def rate_as_tensor(device: str) -> None:
    rate = torch.tensor(0.5, device=device)
    parameter = torch.nn.Parameter(torch.zeros(1, device=device))
    mine = Adam([parameter], lr=rate, capturable=device != "cpu")
    copied = copy.deepcopy(mine.state_dict())
    for multiplier in (0.5, 1.0, 0.1):
        set_lr(mine, multiplier)
        assert mine.param_groups[0]["lr"] is rate  # a captured graph reads this very tensor
        torch.testing.assert_close(rate.cpu(), torch.tensor(0.5 * multiplier), rtol=1e-6, atol=0)
    assert copied["param_groups"][0]["lr"] == 0.5


def test_a_rate_that_is_a_tensor_is_written_in_place() -> None:
    rate_as_tensor("cpu")


@pytest.mark.gpu
@needs_cuda
def test_a_rate_that_is_a_tensor_is_written_on_its_device() -> None:
    rate_as_tensor("cuda")
