"""What a forward pass changes of a model besides its gradients: statistics, as they were before it."""

from typing import Any

import torch
from torch import Tensor, nn


class KeptBuffers:
    """Copies of the buffers that a checkpoint holds, taken in one call for each kind of them.

    Others are tables that a model makes again, and may be of another shape by then.

    Args:
        model: whose buffers are meant.
    """

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            (module._buffers, name)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self._kept: list[list[Tensor]] | None = None

    def keep(self) -> None:
        """Copy them; does not wait for the device."""
        live = self._live()
        with torch.no_grad():
            if self._kept is None:
                self._kept = [[tensor.clone() for tensor in group] for group in live]
            else:
                _copy(live, self._kept)

    def put_back(self) -> None:
        """Let the model have what was copied last."""
        if self._kept is not None:
            with torch.no_grad():
                _copy(self._kept, self._live())

    def _live(self) -> list[list[Tensor]]:
        """As they are now, floating ones and counts apart: one kernel copies tensors of one type."""
        tensors: list[Any] = [holder[name] for holder, name in self._slots]
        floating = [tensor for tensor in tensors if tensor.is_floating_point()]
        return [floating, [tensor for tensor in tensors if not tensor.is_floating_point()]]


def _copy(source: list[list[Tensor]], target: list[list[Tensor]]) -> None:
    for tensors, places in zip(source, target, strict=True):
        if tensors:
            torch._foreach_copy_(places, tensors)
