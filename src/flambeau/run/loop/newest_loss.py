"""The loss for a progress bar, read without making the loop wait for the device."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

_EVERY_S = 1.0
_NUM = 50  # losses, whose mean is shown: one alone jumps; chosen


class NewestLoss:
    """The mean of the newest losses, at most once a second.

    On a CUDA device it is copied to the host behind the work that is queued there, and read when the copy has
    arrived. Of other accelerators nothing is read between two log points.

    Args:
        device: of the training.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._due = 0.0
        self._on_host: Tensor | None = None
        self._arrived: torch.Event | None = None

    def read(self, losses: Sequence[Tensor]) -> float | None:
        """The mean of the last of them, or of earlier ones; None where nothing new is known.

        Args:
            losses: 0-d, float32, on the device.
        """
        value = self._of_copy()
        if not losses or time.perf_counter() < self._due or self._arrived is not None:
            return value
        self._due = time.perf_counter() + _EVERY_S
        if self._device.type == "cpu":
            return float(torch.stack(list(losses[-_NUM:])).mean())
        if self._device.type == "cuda":
            if self._on_host is None:
                self._on_host = torch.zeros((), pin_memory=True)
            self._on_host.copy_(torch.stack(list(losses[-_NUM:])).mean(), non_blocking=True)
            self._arrived = torch.Event(self._device)
            self._arrived.record()
        return value

    def _of_copy(self) -> float | None:
        """What the copy has brought, if it is there; asking that does not wait."""
        if self._arrived is None or self._on_host is None or not self._arrived.query():
            return None
        self._arrived = None
        return float(self._on_host)
