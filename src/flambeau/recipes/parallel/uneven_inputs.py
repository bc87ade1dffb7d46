"""Train ranks with different numbers of batches, or of samples in them, to the exact global gradient.

各 rank 的批次数或批次大小不同时，仍得到精确的全局梯度。

Source: own; the mean over all samples is the sum over ranks of (their share of the samples) times their mean.

A rank that has run out of batches repeats its last one, at weight 0, so that every collective of DDP
finds its peers. The weights are known before the first step: no step costs an additional message.
torch's Join sends one per step instead, needs no sizes, and weighs ranks, not samples.

Not for streams of unknown length. BatchNorm sees the repeated batch, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import torch.distributed as dist

_Batch = TypeVar("_Batch")


def even_steps(
    batches: Iterable[_Batch], sizes: Sequence[int], *, group: dist.ProcessGroup | None = None
) -> Iterator[tuple[_Batch, float]]:
    """Go through this rank's batches in as many steps as the rank with the most of them needs.

    All ranks of the group must call it, once per epoch, and take all steps. With `(loss * weight).backward()`
    under DDP the gradient of step k is that of the mean loss over the samples of all ranks' k-th batches.

    Args:
        batches: of this rank, such as a DataLoader.
        sizes: samples in each of them, at least 1; at least one batch.
        group: the ranks that DDP averages over; None is all of them.

    Yields:
        (batch, weight): weight = world_size * its samples / samples of this step on all ranks, which is 1
        where all have as many, and 0 for a batch that is there to keep step.

    Raises:
        ValueError: before the first step, on all ranks alike: a rank without a batch, a size below 1.
            On this rank: `batches` are more or fewer than `sizes`.

    Example:
        >>> list(even_steps(["a", "b"], [4, 2]))
        [('a', 1.0), ('b', 1.0)]
    """
    everyone = [list(sizes)]
    if dist.is_initialized():
        everyone *= dist.get_world_size(group)
        dist.all_gather_object(everyone, everyone[0], group=group)
    for rank, theirs in enumerate(everyone):
        if min(theirs, default=0) < 1:
            raise ValueError(
                f"every rank needs a batch, and every batch a sample; rank {rank} has {len(theirs)} "
                f"batches, the smallest of {min(theirs, default=0)}: use fewer ranks or smaller batches"
            )
    totals = [sum(step) for step in zip_longest(*everyone, fillvalue=0)]
    iterator = iter(batches)
    end = object()
    for step, size in enumerate(sizes):
        batch: Any = next(iterator, end)
        if batch is end:
            raise ValueError(f"sizes name {len(sizes)} batches, but there are only {step}")
        yield batch, len(everyone) * size / totals[step]
    if next(iterator, end) is not end:
        raise ValueError(f"sizes name {len(sizes)} batches, but there are more")
    for _ in totals[len(sizes) :]:
        yield batch, 0.0
