"""The interface of a training loop to the processes that share its model: how gradients become equal."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.parallel.gradient_sync.parts_in_lockstep import PartsInLockstep


class GradientSync(Protocol):
    """Keeps the gradients and the other state of a model equal over the ranks.

    `Replicas` (ddp.py) has the whole model on each rank, `Shards` (fsdp.py) a part of it, and `FixedParts`
    (fixed_parts.py) adds in an order that does not depend on the number of ranks.
    """

    @property
    def averages_over(self) -> int:
        """By what it divides the sum of all gradients."""

    @property
    def together(self) -> PartsInLockstep | None:
        """Computes the parts of a step beside each other, where they need each other; else None."""

    def start_epoch(self) -> None:
        """Check whether the set of trained parameters has changed; before the first batch of an epoch."""

    def before_batch(self, micro: MicroBatch) -> None:
        """Prepare for the forward and the backward pass of a micro-batch."""

    def after_part(self) -> None:
        """The backward pass of a micro-batch is done, which may not be the last of its global batch."""

    def after_backward(self, *, scale: Tensor | None = None) -> Sequence[Tensor]:
        """Make the gradients those of the global batch, before the optimizer's step.

        Args:
            scale: 0-d: by what the loss was multiplied (fp16), else None.

        Returns:
            What must be finite too for the step to count.
        """

    def share_statistics(self, also: Mapping[str, Tensor]) -> None:
        """Give all ranks the buffers of rank 0, which are the ones that are saved, and these averages."""

    def roll_back(self) -> None:
        """Forget what is kept of earlier gradients: the run goes back to a checkpoint."""


def buffer_versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity and version of each buffer but the statistics of normalisation layers: they change on a write.

    Those do not enter the training forward pass: rank 0's are the ones that count.
    """
    statistics = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    return {n: (id(b), b._version) for n, b in model.named_buffers() if n not in statistics}
