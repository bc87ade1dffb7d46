"""One batch of the script, learned by heart from the first weights, at several rates.

It runs when the watch is over: the script goes no further. Weights, buffers and gradients are put back.
"""

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flambeau.tune.watch.learning.losses import LossCall

_MOST_VALUES = 20_000_000  # of weights that are kept; chosen
_STEPS = 60
_STEPS_AT_RATE = 20
_RATES = 1e-3, 1e-2
_FACTORS = 1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3
_MOST_S = 6.0
# What a forward pass that is called out of its place, or an optimizer of the user's, may raise.
_RAISED = RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError


@dataclass(frozen=True)
class ModelCall:
    """A call of a model from outside of modules, and what it gave."""

    module: nn.Module
    args: tuple[Any, ...]
    output: Callable[[], Tensor | None]


class Rehearsal:
    """Keeps the newest batch whose loss is one call of a loss on the output of one call of a model."""

    def __init__(self) -> None:
        self._call: ModelCall | None = None
        self._loss: LossCall | None = None
        self._first: list[tuple[Tensor, Tensor]] = []

    def keep(self, call: ModelCall, loss: LossCall) -> None:
        """After backward and before the step, so that the first time weights are those of the beginning."""
        if not self._first:
            tensors = [*call.module.parameters(), *call.module.buffers()]
            if sum(one.numel() for one in tensors) > _MOST_VALUES:
                return
            self._first = [(one, one.detach().clone()) for one in tensors]
        self._call = call
        self._loss = loss

    def results(self, optimizer: Optimizer | None) -> dict[str, Any]:
        """Losses of the batch at the first and the last step: with Adam, and with the script's optimizer."""
        parameters = [p for p, _ in self._first if p.requires_grad and p.is_leaf]
        if self._call is None or not parameters:  # it may be frozen by now
            return {}
        now = [(one, one.detach().clone(), one.grad) for one, _ in self._first]
        end = time.monotonic() + _MOST_S
        by_heart: list[dict[str, float]] = []
        rates: list[dict[str, float]] = []
        try:
            for rate in _RATES:
                adam = torch.optim.Adam(parameters, rate)
                by_heart += self._tried(adam, _STEPS, end, rate=rate)
            for factor in _FACTORS if optimizer is not None else ():
                with suppress(*_RAISED):
                    other, rate = _at(optimizer, factor)
                    rates += self._tried(other, _STEPS_AT_RATE, end, rate=rate, factor=factor)
        finally:
            with torch.no_grad():
                for one, value, gradient in now:
                    one.copy_(value)
                    one.grad = gradient
        return {"by_heart": by_heart, "rates": rates}

    def _tried(
        self, optimizer: Optimizer, steps: int, end: float, **figures: float
    ) -> list[dict[str, float]]:
        """One row, or none if the steps could not be made in time."""
        losses: list[float] = []
        with torch.no_grad():
            for one, value in self._first:
                one.copy_(value)
        with suppress(*_RAISED), torch.enable_grad():
            while len(losses) < steps and time.monotonic() < end:
                losses.append(self._step(optimizer))
        if len(losses) < steps:
            return []
        return [{"first": losses[0], "last": losses[-1], "steps": steps, **figures}]

    def _step(self, optimizer: Optimizer) -> float:
        assert self._call is not None and self._loss is not None
        optimizer.zero_grad()
        output = self._call.module(*self._call.args)
        loss: Tensor = self._loss.function(output.reshape(self._loss.shape), **self._loss.arguments)
        loss.backward()
        optimizer.step()
        return float(loss.detach())


def is_reshaped(output: Tensor | None, given: Tensor) -> bool:
    """Whether a reshape of an output gives what the loss got."""
    if output is None:
        return False
    is_plain = given.is_contiguous() and output.is_contiguous()
    return is_plain and given.data_ptr() == output.data_ptr() and given.numel() == output.numel()


def _at(optimizer: Optimizer | None, factor: float) -> tuple[Optimizer, float]:
    """One of the same class and settings, with another rate."""
    assert optimizer is not None
    made: Any = type(optimizer)
    groups = [
        {name: value for name, value in group.items() if name != "initial_lr"}
        | {"lr": factor * float(group.get("initial_lr", group["lr"]))}
        for group in optimizer.param_groups
    ]
    rate = max(float(group["lr"]) for group in groups)
    return made(groups, lr=rate), rate


def output_of(value: Any) -> Callable[[], Tensor | None]:
    """A tensor that is not kept alive."""
    return weakref.ref(value) if isinstance(value, Tensor) else lambda: None
