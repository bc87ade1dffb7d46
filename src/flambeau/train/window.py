"""Figures of the steps between two log points, kept on the device and read once."""

import operator
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flambeau.recipes.training.metrics import MeanOnDevice


class Window:
    """The losses since the last line, and the means of whatever the user logs.

    Losses are kept as they are: putting one in a list costs nothing, adding it up is an operation a step.

    Args:
        device: of the training.
        clock: seconds, for the figures that depend on the wall.
    """

    def __init__(
        self, device: torch.device, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.device, self._clock = device, clock
        self.losses: list[Tensor] = []
        self.logged: dict[str, MeanOnDevice] = {}
        self.wait_s = 0.0
        self._sizes: list[int] = []
        self._start = clock()

    def add_loss(self, loss: Tensor, num_samples: int) -> list[Tensor]:
        """Count the mean loss of a micro-batch, 0-d; returns all losses so far, float32 without a graph."""
        detached = loss.detach()
        self.losses.append(detached if detached.dtype is torch.float32 else detached.float())
        self._sizes.append(num_samples)
        return self.losses

    def read(self, halted_steps: Tensor) -> tuple[dict[str, float], int]:
        """The row of this window, and `halted_steps` read with it; waits for the device, then starts anew."""
        figures = [torch.stack([halted_steps, *self.losses]).double()]
        figures += [mean.compute().double().view(1) for mean in self.logged.values()]
        halted, *values = torch.cat(figures).tolist()
        losses, logged = values[: len(self.losses)], values[len(self.losses) :]
        seconds = max(self._clock() - self._start, 1e-9)
        samples = sum(self._sizes)
        row = {}
        if samples:
            row["train_loss"] = sum(map(operator.mul, losses, self._sizes)) / samples
        row |= dict(zip(self.logged, logged, strict=True))
        row["images_per_s"] = round(samples / seconds, 1)
        row["data_wait"] = round(min(1.0, self.wait_s / seconds), 4)
        self.losses.clear()
        self._sizes.clear()
        self.logged.clear()
        self.restart_clock()
        return row, int(halted)

    def restart_clock(self) -> None:
        """Leave what happened until now (an evaluation, a pause) out of the figures."""
        self.wait_s, self._start = 0.0, self._clock()

    @property
    def empty(self) -> bool:
        """Nothing was counted since the last line."""
        return not self.losses and not self.logged

    def state_dict(self) -> dict[str, Any]:
        """What is counted so far, so that a resumed run writes the same next line."""
        return {
            "losses": list(self.losses),
            "sizes": list(self._sizes),
            "logged": {name: mean.state_dict() for name, mean in self.logged.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.losses = [loss.to(self.device) for loss in state["losses"]]
        self._sizes = list(state["sizes"])
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
        dtype = torch.float32 if device.type == "mps" else torch.float64
        value = torch.full((), float(value), dtype=dtype, device=device)
    means[name].update(value.detach(), None if value.dim() else num_samples)
