"""The interface between a training loop and the processes that share its model: equal gradients."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from flambeau.data.loading.micro_batch import MicroBatch
from flambeau.parallel.gradient_sync.sync_batchnorm_parts import SyncBatchNormParts


class GradientSync(Protocol):
    """Keeps a model's gradients and other state equal on all ranks.

    `Replicas` (ddp.py) keep the whole model on each rank, `Shards` (fsdp.py) a piece, and `FixedParts`
    (fixed_parts.py) add in an order that does not depend on the number of ranks.
    """

    @property
    def averages_over(self) -> int:
        """The divisor of the sum of all gradients."""

    @property
    def together(self) -> SyncBatchNormParts | None:
        """Computes a step's parts together if the forward pass connects them."""

    def start_epoch(self) -> None:
        """Before the first batch of an epoch: check whether other parameters are trained now."""

    def hold(self, *, behind: int, is_trial: bool) -> None:
        """The next global batch is checked: exchange no gradient before `after_backward`.

        Called again before `after_backward` if its computation is undone and begins again.

        Args:
            behind: this rank computes the share of the rank that stands so many ranks before it.
            is_trial: the computation will be undone.
        """

    def before_batch(self, micro: MicroBatch) -> None:
        """Before the forward pass of a micro-batch."""

    def after_part(self) -> None:
        """After the backward pass of each micro-batch."""

    def after_backward(self, *, scale: Tensor | None = None) -> Sequence[Tensor]:
        """Make the gradients those of the global batch, before the optimizer's step.

        `scale`, 0-d, is the loss's factor in fp16. Returns tensors that must be finite, too.
        """

    def share_statistics(self, also: Mapping[str, Tensor]) -> None:
        """Give all ranks rank 0's buffers, which are saved, and these averages."""

    def roll_back(self) -> None:
        """Forget state from earlier gradients: the run returns to a checkpoint."""


def buffer_versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Identity and version of each buffer, which change on a write.

    Without statistics of normalization layers: training does not read them, and rank 0's count.
    """
    statistics = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    return {n: (id(b), b._version) for n, b in model.named_buffers() if n not in statistics}
