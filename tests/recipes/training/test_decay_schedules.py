import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim import SGD, lr_scheduler

from flambeau.recipes.training.decay_schedules import exponential, polynomial, staircase, wsd

TOTAL = 40
WARMUPS = [0, 1, 7, 39]


def rates_of_torch(make: Callable[[SGD], Any], warmup: int, steps: int = TOTAL + 5) -> list[float]:
    """The rates from torch's own scheduler, after a warm-up of its LinearLR; base rate 1."""

    def optimizer() -> SGD:
        return SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    peer = optimizer()
    scheduler = make(peer)
    if warmup:
        peer = optimizer()
        first = lr_scheduler.LinearLR(peer, start_factor=1 / (warmup + 1), total_iters=warmup)
        scheduler = lr_scheduler.SequentialLR(peer, [first, make(peer)], milestones=[warmup])
    rates = []
    for _ in range(steps):
        rates.append(peer.param_groups[0]["lr"])
        peer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("power", [0.9, 1.0, 2.0])
def test_polynomial_equals_torch(warmup: int, power: float) -> None:
    theirs = rates_of_torch(
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
    theirs = rates_of_torch(lambda o: lr_scheduler.ExponentialLR(o, gamma), warmup)
    mine = [
        exponential(step, total_steps=TOTAL, warmup_steps=warmup, end=0.01)
        for step in range(TOTAL + 5)
    ]
    assert mine[: TOTAL + 1] == pytest.approx(theirs[: TOTAL + 1], rel=1e-9)
    assert mine[TOTAL:] == pytest.approx([0.01] * 5)


@pytest.mark.parametrize("warmup", WARMUPS)
@pytest.mark.parametrize("every", [1, 6, 100])
def test_staircase_equals_torch_until_it_ends(warmup: int, every: int) -> None:
    theirs = rates_of_torch(lambda o: lr_scheduler.StepLR(o, every, gamma=0.97), warmup)
    mine = [
        staircase(step, total_steps=TOTAL, warmup_steps=warmup, every=every, gamma=0.97)
        for step in range(TOTAL + 5)
    ]
    assert mine[:TOTAL] == pytest.approx(theirs[:TOTAL], rel=1e-9)
    assert mine[TOTAL:] == [mine[TOTAL - 1]] * 5


@pytest.mark.parametrize("warmup", WARMUPS)
def test_wsd_equals_torchs_parts_in_a_row(warmup: int) -> None:
    decay = min(10, TOTAL - warmup)
    flat = rates_of_torch(lambda o: lr_scheduler.ConstantLR(o, factor=1.0), warmup, TOTAL - decay)
    fall = rates_of_torch(
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


NAMED: list[tuple[Callable[..., float], dict[str, Any], float]] = [
    (polynomial, {"end": 0.2}, 0.2),
    (exponential, {"end": 0.2}, 0.2),
    (staircase, {"every": 20, "gamma": 0.5}, 0.5),
    (wsd, {"decay_steps": 10, "end": 0.2}, 0.2),
]


@pytest.mark.parametrize(("schedule", "settings", "end"), NAMED)
def test_warmup_is_never_0_and_does_not_keep_growing(
    schedule: Callable[..., float], settings: dict[str, Any], end: float
) -> None:
    values = [schedule(s, total_steps=TOTAL, warmup_steps=4, **settings) for s in range(TOTAL)]
    assert values[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert max(values) == 1.0
    assert all(b <= a for a, b in pairwise(values[4:]))
    after = [
        schedule(s, total_steps=TOTAL, warmup_steps=4, **settings) for s in (TOTAL, 10 * TOTAL)
    ]
    assert after == pytest.approx([end, end])
    assert all(type(value) is float for value in [*values, *after])


@pytest.mark.parametrize(("schedule", "settings", "end"), NAMED)
@pytest.mark.parametrize(
    ("step", "total", "warmup"), [(-1, 10, 0), (0, 0, 0), (0, 10, -1), (0, 10, 11)]
)
def test_lengths_are_refused(
    schedule: Callable[..., float], settings: dict[str, Any], end: float, step: int, total: int,
    warmup: int,
) -> None:  # fmt: skip
    with pytest.raises(ValueError, match=f"got {step}, {total} and {warmup}"):
        schedule(step, total_steps=total, warmup_steps=warmup, **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: polynomial(0, total_steps=9, power=0.0), "power must be above 0, got 0.0"),
        (lambda: polynomial(0, total_steps=9, end=-1.0), "end must be at least 0, got -1.0"),
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
