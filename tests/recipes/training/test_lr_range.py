import copy
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.training.lr_range import LRCurve, lr_range_test, rising_rates


def test_rates_are_those_of_numpy() -> None:
    np = pytest.importorskip("numpy")
    found = rising_rates(1e-6, 10.0, 100)
    assert found == pytest.approx(np.geomspace(1e-6, 10.0, 100).tolist(), rel=1e-12)
    assert (found[0], found[-1]) == (1e-6, 10.0)


@pytest.mark.parametrize(
    ("low", "high", "steps"), [(0.0, 1.0, 9), (1.0, 1.0, 9), (0.1, math.inf, 9), (0.1, 1.0, 1)]
)
def test_rates_that_do_not_rise_are_refused(low: float, high: float, steps: int) -> None:
    with pytest.raises(ValueError, match="0 < low < high and at least 2 steps"):
        rising_rates(low, high, steps)


class Quadratic:
    """A noisy loss of known curvatures: descent diverges from twice the inverse of the largest one on.

    Args:
        largest: curvature.
        groups: of parameters with a rate of their own.
    """

    def __init__(self, largest: float, *, groups: tuple[float, ...] = (1.0,)) -> None:
        self.model = nn.ParameterList([torch.full((4,), 5.0) for _ in groups])
        self.curvatures = torch.linspace(largest / 10, largest, 4)
        parts = [{"params": [p], "lr": lr} for p, lr in zip(self.model, groups, strict=True)]
        self.optimizer = torch.optim.SGD(parts)
        self.rates: list[list[float]] = []

    def step(self) -> Tensor:
        self.rates.append([group["lr"] for group in self.optimizer.param_groups])
        self.optimizer.zero_grad()
        loss = sum(((self.curvatures * p.square()).sum() / 2 for p in self.model), torch.ones(()))
        loss.backward()
        for p in self.model:
            p.grad += 0.1 * self.curvatures * torch.randn(4)
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("largest", [0.5, 2.0, 40.0, 1000.0])
def test_it_ends_where_gradient_descent_diverges(largest: float) -> None:
    torch.manual_seed(0)
    task = Quadratic(largest)
    curve = lr_range_test(task.step, task.model, task.optimizer, low=1e-6, high=100.0, steps=200)
    limit = 2 / largest
    assert limit < curve.rates[-1] < 3 * limit
    assert curve.suggested is not None
    assert limit / 20 < curve.suggested < limit


def test_groups_keep_their_ratios() -> None:
    task = Quadratic(1.0, groups=(0.3, 0.03, 0.0))
    curve = lr_range_test(task.step, task.model, task.optimizer, low=1e-4, high=1.0, steps=20)
    assert curve.rates == pytest.approx([first for first, _, _ in task.rates])
    assert all(b == pytest.approx(a / 10) and c == 0 for a, b, c in task.rates)
    assert [group["lr"] for group in task.optimizer.param_groups] == [0.3, 0.03, 0.0]


def test_a_rate_that_is_a_tensor_stays_the_same_one() -> None:
    model, rate = nn.Linear(3, 1), torch.tensor(0.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, foreach=False)
    seen = []

    def step() -> float:
        seen.append(float(optimizer.param_groups[0]["lr"]))
        return 1.0 / len(seen)

    lr_range_test(step, model, optimizer, steps=5)
    assert optimizer.param_groups[0]["lr"] is rate
    assert (float(rate), len(set(seen))) == (0.25, 5)


class Everything:
    """A step that changes all that can: weights, statistics, momentum, generators, gradients, a scaler."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)
        )
        self.optimizer = torch.optim.AdamW(self.model.bfloat16().parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        self.step()
        for state in self.optimizer.state.values():  # more precise than the weights are
            state["more"] = torch.tensor(1 / 3, dtype=torch.float64)

    def step(self) -> Tensor:
        inputs = torch.randn(6, 4, dtype=torch.bfloat16) * random.random()
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()  # gradients add up, and stay
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def all_of_it(self) -> Any:
        of_optimizer = self.optimizer.state_dict()
        gradients = [None if p.grad is None else p.grad for p in self.model.parameters()]
        return copy.deepcopy(
            (self.model.state_dict(), of_optimizer["state"], of_optimizer["param_groups"], gradients,
             self.scaler.state_dict(), torch.get_rng_state(), random.getstate())
        )  # fmt: skip


@pytest.mark.parametrize("ends", ["whole", "raises", "interrupted"])
def test_everything_is_as_before(ends: str) -> None:
    task, count = Everything(), 0

    def step() -> Tensor:
        nonlocal count
        count += 1
        if count == 5 and ends != "whole":
            raise {"raises": RuntimeError, "interrupted": KeyboardInterrupt}[ends]
        return task.step()

    before = task.all_of_it()
    try:
        lr_range_test(step, task.model, task.optimizer, steps=8, also=[task.scaler])
    except (RuntimeError, KeyboardInterrupt):
        assert count == 5
    torch.testing.assert_close(task.all_of_it(), before, rtol=0, atol=0, equal_nan=True)
    expected = [float(task.step().detach()) for _ in range(3)]
    again = Everything()
    assert [float(again.step().detach()) for _ in range(3)] == expected


def test_a_loss_that_hardly_falls_gives_no_rate() -> None:
    noise = random.Random(0)
    flat, rises, none = LRCurve(), LRCurve(), LRCurve()
    for rate in rising_rates(1e-6, 10.0, 100):
        flat.add(rate, 2.3 + noise.gauss(0, 0.05))
        rises.add(rate, 1.0 + rate)
    assert flat.suggested is None
    assert rises.suggested is None
    assert not none.add(1e-6, math.nan)
    assert (none.rates, none.suggested, none.averaged) == ([], None, [])


def test_averages_do_not_lag() -> None:
    curve = LRCurve()
    for step, rate in enumerate(rising_rates(1e-6, 10.0, 101)):
        curve.add(rate, 1.0 + abs(step - 50) / 50)
    assert min(range(101), key=lambda at: curve.averaged[at]) == 50
    assert curve.suggested == pytest.approx(curve.rates[50] / 2)
    assert (curve.averaged[0], curve.averaged[-1]) == (curve.losses[0], curve.losses[-1])


def test_an_optimizer_that_stands_still_is_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ValueError, match="a learning rate above 0"):
        lr_range_test(lambda: 1.0, model, optimizer)
