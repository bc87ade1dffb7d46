import copy
import io
import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD, Adam, lr_scheduler

from flambeau.recipes.training.schedules import (
    chain,
    constant,
    cosine,
    exponential,
    linear,
    linear_scaled_lr,
    multistep,
    piecewise_linear,
    polynomial,
    set_lr,
    staircase,
    with_warmup,
    wsd,
)

BASE = 0.3
TOTAL = 50
WARMUPS = [0, 1, 7, 49]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


def optimizer(lr: float | torch.Tensor = BASE) -> SGD:
    return SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def rates_of_torch(
    make: Callable[[Any], Any], warmup_steps: int, steps: int = TOTAL
) -> list[float]:
    """The rates from torch's own schedulers, after a warm-up of LinearLR."""
    peer = optimizer()
    main = make(peer)
    if warmup_steps:
        peer = optimizer()
        warmup = lr_scheduler.LinearLR(
            peer, start_factor=1 / (warmup_steps + 1), total_iters=warmup_steps
        )
        main = lr_scheduler.SequentialLR(peer, [warmup, make(peer)], milestones=[warmup_steps])
    rates = []
    for _ in range(steps):
        rates.append(peer.param_groups[0]["lr"])
        peer.step()
        main.step()
    return rates


def multipliers_of_torch(
    make: Callable[[Any], Any], warmup_steps: int, steps: int = TOTAL + 5
) -> list[float]:
    return [rate / BASE for rate in rates_of_torch(make, warmup_steps, steps)]


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
    (polynomial, {"end": 0.2}, 0.2),
    (exponential, {"end": 0.2}, 0.2),
    (staircase, {"every": 25, "gamma": 0.5}, 0.5),
    (wsd, {"decay_steps": 10, "end": 0.2}, 0.2),
]


@pytest.mark.parametrize(("schedule", "settings", "end"), SCHEDULES)
def test_warmup_has_equal_increments_no_zero_and_no_jump(
    schedule: Callable[..., float], settings: dict[str, Any], end: float
) -> None:
    values = [schedule(s, total_steps=TOTAL, warmup_steps=4, **settings) for s in range(TOTAL)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert min(values) > 0
    assert max(values) == 1.0
    assert all(later <= earlier for earlier, later in pairwise(values[4:]))
    assert all(type(value) is float for value in values)


@pytest.mark.parametrize(("schedule", "settings", "end"), SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 10, TOTAL])
def test_stays_at_the_end(
    schedule: Callable[..., float], settings: dict[str, Any], end: float, warmup: int
) -> None:
    if warmup == TOTAL:  # no place for a milestone, a stair or a decay
        if schedule is wsd:
            return
        settings = {"milestones": []} if schedule is multistep else settings
        end = 1.0 if schedule in (multistep, staircase) else end
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


@pytest.mark.parametrize(("schedule", "settings", "end"), SCHEDULES)
@pytest.mark.parametrize(
    ("step", "total", "warmup"), [(-1, 10, 0), (0, 0, 0), (0, 10, -1), (0, 10, 11)]
)
def test_lengths_are_refused(
    schedule: Callable[..., float], settings: dict[str, Any], end: float, step: int, total: int,
    warmup: int,
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=f"got {step}, {total} and {warmup}"):
        schedule(step, total_steps=total, warmup_steps=warmup, **settings)


@pytest.mark.parametrize("schedule", [linear, cosine])
@pytest.mark.parametrize("end", [-0.1, math.nan])
def test_end_is_refused(schedule: Callable[..., float], end: float) -> None:
    with pytest.raises(ValueError, match=f"end must be at least 0 and finite, got {end}"):
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


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("power", [0.9, 1.0, 2.0])
def test_polynomial_equals_torch(warmup: int, power: float) -> None:
    theirs = multipliers_of_torch(
        lambda o: lr_scheduler.PolynomialLR(o, total_iters=TOTAL - warmup, power=power), warmup
    )
    mine = [
        polynomial(step, total_steps=TOTAL, warmup_steps=warmup, power=power)
        for step in range(TOTAL + 5)
    ]
    assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-15)


def test_polynomial_ends_at_its_end() -> None:
    values = [polynomial(step, total_steps=4, end=0.2) for step in range(6)]
    assert values == pytest.approx([0.2 + 0.8 * (1 - k / 4) ** 2 for k in range(5)] + [0.2])


@pytest.mark.parametrize("warmup", WARMUPS)
def test_exponential_equals_torch_until_it_ends(warmup: int) -> None:
    gamma = 0.01 ** (1 / (TOTAL - warmup))
    theirs = multipliers_of_torch(lambda o: lr_scheduler.ExponentialLR(o, gamma), warmup)
    mine = [
        exponential(step, total_steps=TOTAL, warmup_steps=warmup, end=0.01)
        for step in range(TOTAL + 5)
    ]
    assert mine[: TOTAL + 1] == pytest.approx(theirs[: TOTAL + 1], rel=1e-9)
    assert mine[TOTAL:] == pytest.approx([0.01] * 5)


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("every", [1, 6, 100])
def test_staircase_equals_torch_until_it_ends(warmup: int, every: int) -> None:
    theirs = multipliers_of_torch(lambda o: lr_scheduler.StepLR(o, every, gamma=0.97), warmup)
    mine = [
        staircase(step, total_steps=TOTAL, warmup_steps=warmup, every=every, gamma=0.97)
        for step in range(TOTAL + 5)
    ]
    assert mine[:TOTAL] == pytest.approx(theirs[:TOTAL], rel=1e-9)
    assert mine[TOTAL:] == [mine[TOTAL - 1]] * 5


@pytest.mark.parametrize("warmup", WARMUPS)
def test_wsd_equals_torchs_parts_in_a_row(warmup: int) -> None:
    decay = min(10, TOTAL - warmup)
    flat = multipliers_of_torch(
        lambda o: lr_scheduler.ConstantLR(o, factor=1.0), warmup, TOTAL - decay
    )
    fall = multipliers_of_torch(
        lambda o: lr_scheduler.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=decay), 0
    )
    mine = [
        wsd(s, total_steps=TOTAL, warmup_steps=warmup, decay_steps=decay, end=0.1, shape="linear")
        for s in range(TOTAL + 5)
    ]
    assert mine == pytest.approx([*flat, *fall][: TOTAL + 5], rel=1e-9)


def test_shapes_of_the_decay() -> None:
    """The formulas of arXiv 2405.18392, section 3, at a quarter of the way."""
    wanted = {"linear": 0.75, "1-sqrt": 0.5, "cosine": (1 + math.cos(math.pi / 4)) / 2}
    for shape, share in wanted.items():
        found = wsd(9, total_steps=12, decay_steps=4, end=0.2, shape=shape)  # type: ignore[arg-type]
        assert found == pytest.approx(0.2 + 0.8 * share)


def test_until_the_decay_wsd_does_not_depend_on_the_length() -> None:
    short, long = (
        [wsd(step, total_steps=total, warmup_steps=3, decay_steps=5) for step in range(15)]
        for total in (20, 2000)
    )
    assert short == long


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: polynomial(0, total_steps=9, power=0.0), "power must be above 0, got 0.0"),
        (
            lambda: polynomial(0, total_steps=9, end=-1.0),
            "end must be at least 0 and finite, got -1.0",
        ),
        (lambda: exponential(0, total_steps=9, end=0.0), "no factor leads to 0"),
        (lambda: staircase(0, total_steps=9, every=0), "got 0 and 0.1"),
        (lambda: staircase(0, total_steps=9, every=1, gamma=math.nan), "got 1 and nan"),
        (lambda: wsd(0, total_steps=9, warmup_steps=4, decay_steps=6), "from 1 to 5.*got 6"),
        (lambda: wsd(0, total_steps=9, decay_steps=0), "got 0"),
        (lambda: wsd(0, total_steps=9, decay_steps=3, shape="sqrt"), "got 'sqrt'"),  # type: ignore[arg-type]
    ],
)
def test_other_numbers_are_refused(call: Callable[[], float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---------------------------------------------------------------- chained


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
    """Above 0 from the first step, equal increments, and no growth after it."""
    mine = with_warmup(lambda step: 0.8 * half(step), warmup_steps=warmup)
    values = [mine(step) for step in range(30)]
    assert values[:warmup] == pytest.approx([0.8 * (k + 1) / (warmup + 1) for k in range(warmup)])
    assert values[warmup:] == [0.8 * half(step) for step in range(30 - warmup)]
    assert min(values) > 0
    assert max(values) == values[warmup] == 0.8


def test_no_warmup_is_the_schedule_itself() -> None:
    mine = with_warmup(half, warmup_steps=0)
    assert [mine(step) for step in range(9)] == [half(step) for step in range(9)]


def test_a_lambda_of_t_over_10_is_no_warmup() -> None:
    """Its first epoch has no rate at all, and it keeps growing."""
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
def test_chains_and_points_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


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
