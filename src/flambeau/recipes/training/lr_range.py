"""Learning-rate range test: a short training with a rising rate shows which rates work.

学习率范围测试：用逐步升高的学习率做一次短训练，看出哪些学习率合适。

Source: Smith, "Cyclical Learning Rates for Training Neural Networks", arXiv 1506.01186, section 3.3.
The rate grows geometrically, as in fastai's finder; the rule for the suggestion is original.

Not for a loss that a rate changes only much later, such as that of a GAN or of reinforcement learning.
"""

import copy
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_DECAY = 0.9  # of the running mean of losses that shows a divergence, per step
_DIVERGED = 3.0  # the test ends at this multiple of the lowest running mean
_MIN_FALL = 0.05  # of the first losses; less is noise
_SAFE = (
    0.5  # times the rate with the lowest loss: above it training may diverge; see docs/en/train.md
)


@dataclass
class LRCurve:
    """The losses of a range test, and the rate that they suggest.

    Attributes:
        rates: of the steps made, rising.
        losses: of each step, before it changed the weights.

    Example:
        >>> curve = LRCurve()
        >>> [curve.add(10.0**k, loss) for k, loss in enumerate([1.0, 0.5, 30.0])]
        [True, True, False]
    """

    rates: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    _mean: float = 0.0
    _lowest: float = math.inf

    def add(self, rate: float, loss: float) -> bool:
        """Add a step's loss; False if the training has diverged and the test should end."""
        if not math.isfinite(loss):
            return False
        self.rates.append(rate)
        self.losses.append(loss)
        self._mean = _DECAY * self._mean + (1 - _DECAY) * loss
        mean = self._mean / (1 - _DECAY ** len(self.losses))
        self._lowest = min(self._lowest, mean)
        return mean - self._lowest <= (_DIVERGED - 1) * abs(self._lowest)

    @property
    def averaged(self) -> list[float]:
        """The mean of each loss and its neighbours, equally many on both sides, so without a lag."""
        losses = self.losses
        means = []
        for i in range(len(losses)):
            width = min(max(1, len(losses) // 20), i, len(losses) - 1 - i)
            means.append(statistics.fmean(losses[i - width : i + width + 1]))
        return means

    @property
    def suggested(self) -> float | None:
        """Half of the rate at which the averaged loss is lowest; None if it has hardly fallen.

        Use it as the peak rate of a schedule with a warm-up that falls to zero.
        """
        means = self.averaged
        lowest = min(range(len(means)), key=lambda i: means[i], default=0)
        if not means or means[0] - means[lowest] < _MIN_FALL * abs(means[0]):
            return None
        return _SAFE * self.rates[lowest]


def rising_rates(low: float, high: float, steps: int) -> list[float]:
    """Rates from `low` to `high`, each the same multiple of the one before.

    Raises:
        ValueError: not 0 < low < high, or fewer than two steps.

    Example:
        >>> rising_rates(0.01, 1.0, 3)
        [0.01, 0.1, 1.0]
    """
    if not 0 < low < high < math.inf or steps < 2:
        raise ValueError(f"0 < low < high and at least 2 steps, got {low}, {high} and {steps}")
    ratio = (high / low) ** (1 / (steps - 1))
    return [*(low * ratio**step for step in range(steps - 1)), high]


def lr_range_test(
    step: Callable[[], Tensor | float],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    low: float = 1e-6,
    high: float = 10.0,
    steps: int = 100,
    also: Sequence[Any] = (),
) -> LRCurve:
    """Make training steps with a rising learning rate, and restore everything afterwards.

    Parameters, buffers, gradients, optimizer, `also` and the generators of Python and torch are restored to
    the bit, even after an error or Ctrl-C; state inside `step`, such as a position in the data, is not.

    Args:
        step: makes a whole training step, with the optimizer, and returns its loss.
        optimizer: groups keep the ratios of their rates; the curve has the largest.
        low, high: rates of the first and, unless training diverges, the last step.
        also: other objects with `state_dict` that a step changes: a gradient scaler, an EMA.

    Raises:
        ValueError: no group has a rate above 0, or not 0 < low < high, or fewer than two steps.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step():
        ...     optimizer.zero_grad()
        ...     loss = (model(torch.ones(8, 4)) - 3).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> curve = lr_range_test(step, model, optimizer)
        >>> 0.01 < curve.suggested < 0.2  # from 2 / 10 on, twice the inverse of the curvature, it diverges
        True
    """
    rates = rising_rates(low, high, steps)
    groups = optimizer.param_groups
    shares = [float(group["lr"]) for group in groups]
    if not max(shares) > 0:
        raise ValueError("the optimizer needs a learning rate above 0 in one of its groups")
    curve = LRCurve()
    with _restored(model, optimizer, also):
        for rate in rates:
            for group, share in zip(groups, shares, strict=True):
                _set_rate(group, rate * share / max(shares))
            loss = step()
            if not curve.add(rate, float(loss.detach() if isinstance(loss, Tensor) else loss)):
                break
    return curve


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # a captured graph may read it
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


@contextmanager
def _restored(model: nn.Module, optimizer: Optimizer, also: Sequence[Any]) -> Iterator[None]:
    # By place, too: a forward pass may put another tensor in the place of a buffer.
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p for group in optimizer.param_groups for p in group["params"]]
    values = [
        (t, t.detach().clone(), t.grad if t.grad is None else t.grad.clone()) for t in tensors
    ]
    # Not by load_state_dict, which would round state that is more precise than its parameter.
    groups = [{**group, "lr": float(group["lr"])} for group in optimizer.param_groups]
    state = {p: copy.deepcopy(p_state) for p, p_state in optimizer.state.items()}
    more = [copy.deepcopy(part.state_dict()) for part in also]
    generators = random.getstate(), torch.get_rng_state()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    drawn = None if device is None else torch.get_device_module(device).get_rng_state()
    try:
        yield
    finally:
        for buffers, before_test in places:
            buffers.clear()
            buffers.update(before_test)
        with torch.no_grad():
            for tensor, value, gradient in values:
                tensor.copy_(value)
                tensor.grad = gradient
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            _set_rate(group, before.pop("lr"))
            group.update(before)
        for part, part_state in zip(also, more, strict=True):
            part.load_state_dict(part_state)
        random.setstate(generators[0])
        torch.set_rng_state(generators[1])
        if device is not None:
            torch.get_device_module(device).set_rng_state(drawn)
