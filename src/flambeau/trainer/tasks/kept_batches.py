"""What an evaluation keeps of its batches, for tasks whose figures need all images at once.

N: images, K: outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from flambeau.trainer.evaluation.reading import Reading

Result = TypeVar("Result")


@dataclass(frozen=True)
class KeptBatches(Generic[Result]):
    """Outputs, losses and targets of each image, on the device of the model.

    Args:
        losses: of a batch, (N,), from outputs and targets on one device.
        result: makes the evaluation of (indices, outputs, targets), all on the CPU, the mean loss, how the
            images were read, and their names.
    """

    losses: Callable[[Tensor, Tensor], Tensor]
    result: Callable[..., Result]
    indices: list[int] = field(default_factory=list)
    _batches: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def update(self, outputs: Tensor, targets: Tensor, indices: Sequence[int]) -> None:
        """Count a batch: (N, K) outputs, (N, K) targets and the positions of the images."""
        losses = self.losses(outputs, targets.to(outputs.device))
        self._batches.append((outputs.float(), targets, losses))
        self.indices.extend(indices)

    def evaluation(self, *, describe: Callable[[int], str], **facts: Any) -> Result:
        """All figures, read from the device."""
        outputs, targets, losses = (
            torch.cat(one).cpu() for one in zip(*self._batches, strict=True)
        )
        return self.result(
            torch.tensor(self.indices),
            outputs,
            targets,
            loss=float(losses.double().mean()),
            reading=Reading(num_images=len(outputs), **facts),
            describe=describe,
        )
