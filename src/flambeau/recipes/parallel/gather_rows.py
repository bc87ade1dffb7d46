"""Gather tensors with different numbers of rows from all ranks, without padding in the result.

从所有 rank 收集行数不同的张量，结果中没有填充。

Source: own; torch's all_gather needs the same shape on every rank (gloo), or hangs or fails without.

Not for values that only need a sum or a mean: all_reduce of sum and count moves a few bytes and waits for
nothing. Not in a training step: it waits for the device.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(rows: Tensor, *, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Collect each rank's rows on every rank, such as the predictions of a validation set.

    All ranks of the group must call it. Without a process group the list has one tensor.

    Args:
        rows: (N, ...) of any dtype, on a device of the group's back end; N may differ between ranks and be
            0, the other sizes and the dtype are the same on all.
        group: the ranks that take part; None is all of them.

    Returns:
        The rows of rank 0, of rank 1, ...: (N_rank, ...) each, of the same dtype and device, without
        gradient; `torch.cat` makes one tensor of them.

    Raises:
        ValueError: on every rank alike: a 0-d tensor, or dtypes or sizes that differ.

    Example:
        >>> gather_rows(torch.arange(3))
        [tensor([0, 1, 2])]
    """
    rows = rows.detach()
    world_size = dist.get_world_size(group) if dist.is_initialized() else 1
    kinds: list[Any] = [(str(rows.dtype), tuple(rows.shape))] * world_size
    if world_size > 1:
        dist.all_gather_object(kinds, kinds[0], group=group)
    if (
        not all(shape for _, shape in kinds)
        or len({(name, *shape[1:]) for name, shape in kinds}) > 1
    ):
        got = ", ".join(
            f"{name} {shape} on rank {rank}" for rank, (name, shape) in enumerate(kinds)
        )
        raise ValueError(
            f"every rank needs a tensor (N, ...) of the same dtype and sizes, but for N; got {got}"
        )
    if world_size == 1:
        return [rows]
    # As bytes, so that every dtype passes through every back end.
    counts = [shape[0] for _, shape in kinds]
    sent = rows.new_zeros((max(counts), *rows.shape[1:]))
    sent[: len(rows)] = rows
    parts = [torch.empty_like(sent) for _ in counts]
    if sent.numel():
        dist.all_gather([_bytes(part) for part in parts], _bytes(sent), group=group)
    return [part[:count] for part, count in zip(parts, counts, strict=True)]


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, as uint8."""
    return tensor.view(-1).view(torch.uint8)
