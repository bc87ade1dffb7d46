"""Gradient accumulation that gives exactly the gradient of the mean over the whole batch.

梯度累积：所得梯度恰好等于整个批次平均损失的梯度。

Source: own; the mean over N samples is the sum over micro-batches of (n/N) times their means.

Each micro-batch goes forward and backward before the next one starts, so that one graph at a time
is alive.
Not for a loss whose mean depends on the other samples (contrastive losses), and BatchNorm takes
its statistics from each micro-batch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


class MicroBatch(NamedTuple):
    """The rows of a batch that go through the model together, and their share of it.

    Example:
        >>> rows, weight = MicroBatch(slice(0, 2), 0.5)
        >>> torch.arange(4)[rows]
        tensor([0, 1])
    """

    rows: slice
    weight: float


def micro_batch_weights(num_samples: int, micro_batch_size: int) -> list[MicroBatch]:
    """Cut a batch into micro-batches, each with the weight that its mean loss has.

    Args:
        num_samples: N, samples in the batch, at least 1.
        micro_batch_size: rows of each micro-batch but the last, which may be smaller; at least 1.

    Returns:
        (rows, weight) in the order of the rows; weight = rows/N, and the weights add up to 1.

    Raises:
        ValueError: a number below 1.

    Example:
        >>> [(rows.start, rows.stop, weight) for rows, weight in micro_batch_weights(10, 4)]
        [(0, 4, 0.4), (4, 8, 0.4), (8, 10, 0.2)]
    """
    if num_samples < 1 or micro_batch_size < 1:
        raise ValueError(
            f"num_samples and micro_batch_size must be at least 1, "
            f"got {num_samples} and {micro_batch_size}"
        )
    starts = range(0, num_samples, micro_batch_size)
    stops = [*starts[1:], num_samples]
    return [
        MicroBatch(slice(start, stop), (stop - start) / num_samples)
        for start, stop in zip(starts, stops, strict=True)
    ]


def accumulate_gradients(
    loss_of: Callable[..., Tensor],
    batch_tensors: Sequence[Tensor],
    *,
    micro_batch_size: int,
    scale: float | Tensor = 1.0,
    no_sync: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Tensor:
    """Add the gradient of the batch's mean loss to the parameters, one micro-batch at a time.

    Args:
        loss_of: takes the same rows of each tensor and returns their mean loss, 0-d floating.
        batch_tensors: tensors of one length N, at least 1, in the order that `loss_of` takes.
        micro_batch_size: rows that go through `loss_of` together; from N on it is called once.
        scale: the gradients are multiplied by it, the result is not.
            A loss scale for fp16, 0-d on the device: scaler.scale(torch.ones((), device=...)).
            With DDP, which averages over ranks: N * world_size / samples of all ranks.
        no_sync: DDP's `model.no_sync`, entered around all micro-batches but the last, so that the
            gradients travel once.

    Returns:
        The mean loss of the batch: 0-d, detached, on the device of the loss; float64 for a
        float64 loss, else float32.

    Raises:
        ValueError: no tensors or no rows, different lengths, a loss that is not 0-d.

    Example:
        >>> weight, x = torch.zeros(1, requires_grad=True), torch.arange(5.0)
        >>> accumulate_gradients(lambda x: (x * weight + x).mean(), [x], micro_batch_size=2)
        tensor(2.)
        >>> weight.grad
        tensor([2.])
    """
    lengths = [len(tensor) for tensor in batch_tensors]
    if not lengths or len(set(lengths)) > 1:
        raise ValueError(f"batch_tensors must be tensors of one length, got lengths {lengths}")
    parts = micro_batch_weights(lengths[0], micro_batch_size)
    total: Tensor | None = None
    for rows, weight in parts:
        with no_sync() if rows.stop < lengths[0] else nullcontext():
            loss = loss_of(*(tensor[rows] for tensor in batch_tensors))
            if loss.ndim:
                raise ValueError(f"loss_of must return a 0-d mean, got {tuple(loss.shape)}")
            # The weight is where backward starts: no multiplication in the graph.
            root = torch.full_like(loss, weight, requires_grad=False).mul_(scale)
            torch.autograd.backward(loss, root)
        share = loss.detach().to(torch.promote_types(loss.dtype, torch.float32)) * weight
        total = share if total is None else total + share
    assert total is not None  # there is at least one row
    return total
