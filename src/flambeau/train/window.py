"""Figures of the steps between two log points, summed on the device and read once."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flambeau.recipes.training.metrics import MeanOnDevice


class Window:
    """Sums of losses and of whatever the user logs; and the flag that stops a run that went bad.

    `halted` is 1 from the first step on whose loss or gradient was not finite. It stays on the device: the
    optimizer obeys it there, and the host reads it with the figures.

    Args:
        device: of the training.
        clock: seconds, for the figures that depend on the wall.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self._clock = device, clock
        self.halted = torch.zeros((), device=device)
        self.wait_s = 0.0
        self.logged: dict[str, MeanOnDevice] = {}
        self._halted_steps = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._loss_sum = torch.zeros((), device=device)
        self._samples = 0
        self._start = clock()

    def add_loss(self, loss: Tensor, num_samples: int) -> None:
        """Count the mean loss of a micro-batch."""
        self._loss_sum.add_(loss.detach(), alpha=num_samples)
        self._samples += num_samples

    def check_loss(self) -> None:
        """Set `halted` if a loss was not finite: then the sum is not, and stays so."""
        torch._amp_foreach_non_finite_check_and_unscale_([self._loss_sum], self.halted, self._one)

    def end_step(self, skipped: Tensor | None) -> None:
        """Close a step; `skipped` is 1 where a gradient was not finite, None where that is no matter."""
        if skipped is not None:
            self.halted.copy_(skipped)
        self._halted_steps.add_(self.halted)

    def read(self) -> tuple[dict[str, float], int]:
        """The row of this window and how many steps have been halted; waits for the device."""
        figures = [self._loss_sum.double(), self._halted_steps.double()]
        figures += [mean.compute().double() for mean in self.logged.values()]
        loss_sum, halted_steps, *logged = torch.stack(figures).tolist()
        seconds = max(self._clock() - self._start, 1e-9)
        row = {"train_loss": loss_sum / self._samples} if self._samples else {}
        row |= dict(zip(self.logged, logged, strict=True))
        row["images_per_s"] = round(self._samples / seconds, 1)
        row["data_wait"] = round(min(1.0, self.wait_s / seconds), 4)
        self._loss_sum.zero_()
        self.logged.clear()
        self._samples = 0
        self.restart_clock()
        return row, int(halted_steps)

    def restart_clock(self) -> None:
        """Leave what happened until now (an evaluation, a pause) out of the figures."""
        self.wait_s, self._start = 0.0, self._clock()

    @property
    def empty(self) -> bool:
        """Nothing was counted since the last line."""
        return not self._samples and not self.logged

    def state_dict(self) -> dict[str, Any]:
        """The open sums, so that a resumed run writes the same next line."""
        return {
            "loss_sum": self._loss_sum,
            "samples": self._samples,
            "logged": {name: mean.state_dict() for name, mean in self.logged.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._loss_sum.copy_(state["loss_sum"])
        self._samples = state["samples"]
        for name, mean in state["logged"].items():
            self.logged[name] = MeanOnDevice(device=self.device)
            self.logged[name].load_state_dict(mean)


def add_value(
    means: dict[str, MeanOnDevice],
    name: str,
    value: Tensor | float,
    num_samples: int,
    device: torch.device,
) -> None:
    """Count one value under a name, without waiting for the device."""
    if name not in means:
        means[name] = MeanOnDevice(device=device)
    if not isinstance(value, Tensor):
        value = torch.full((), float(value), device=device)
    means[name].update(value.detach(), None if value.dim() else num_samples)
