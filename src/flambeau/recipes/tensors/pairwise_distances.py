"""Euclidean distances between all rows of two matrices, exact for close points, with finite gradients.

两个矩阵所有行之间的欧氏距离：近点也精确，梯度有限，内存为 O(MN)。

Source: the definition, by `torch.cdist` without matrix products. Its gradient is formed here by blocks of
rows, because the one of `torch.cdist` on a GPU fills an (N, M, D) buffer
(ATen/native/cuda/DistanceKernel.cu). The expansion |a|^2 + |b|^2 - 2ab, which `torch.cdist` takes by
default from 26 rows on, has in float32 no correct digit for points that are closer together than about
1/3000 of their distance to the origin. Not for searches in millions of rows: use an index (faiss).

M, N: rows; D: dimensions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def pairwise_distances(a: Tensor, b: Tensor, *, squared: bool = False) -> Tensor:
    """All distances between rows of `a` and rows of `b`.

    Forward and backward take O(MN) memory beside the inputs. At distance zero the gradient is 0. float16 and
    bfloat16 are computed in float32 and rounded at the end. It can be differentiated twice.

    Args:
        a: (..., M, D) floating.
        b: (..., N, D) of the same dtype and device; leading dimensions broadcast.
        squared: give squared distances, whose gradient needs no division.

    Returns:
        (..., M, N), dtype and device of the inputs.

    Raises:
        ValueError: shapes that do not fit.
        TypeError: dtypes that differ or are not floating.

    Example:
        >>> a = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
        >>> distances = pairwise_distances(a, a)
        >>> distances.tolist()
        [[0.0, 5.0], [5.0, 0.0]]
        >>> distances.sum().backward()
        >>> a.grad.isfinite().all()
        tensor(True)
    """
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-1]:
        raise ValueError(
            "a must be (..., M, D) and b (..., N, D) with the same D, "
            f"got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.dtype != b.dtype or not a.dtype.is_floating_point:
        raise TypeError(f"a and b must be of one floating dtype, got {a.dtype} and {b.dtype}")
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    dtype = torch.float64 if a.dtype == torch.float64 else torch.float32
    # Outside of the function, so that autograd undoes the broadcast and the cast.
    rows, columns = (x.to(dtype).expand(*batch, *x.shape[-2:]) for x in (a, b))
    distances: Tensor = _Distances.apply(rows, columns, squared)
    return distances.to(a.dtype)


def reduce_distances(
    a: Tensor,
    b: Tensor,
    reduce: Callable[[Tensor], Tensor],
    *,
    chunk_rows: int,
    squared: bool = False,
) -> Tensor:
    """What `reduce` makes of each row of the distances, without ever holding all of them.

    Memory is O(chunk_rows N), in the backward pass too: there each chunk is computed again.

    Args:
        a: (M, D) floating.
        b: (N, D) of the same dtype and device.
        reduce: from (rows, N) distances to (rows, ...), each row by itself.
        chunk_rows: rows of `a` at once, at least 1.
        squared: pass squared distances.

    Returns:
        (M, ...), the results of the chunks one after the other.

    Raises:
        ValueError: as `pairwise_distances`; batches; a chunk without rows.

    Example:
        >>> a, b = torch.eye(3), 2 * torch.eye(3)
        >>> reduce_distances(a, b, lambda distances: distances.argmin(1), chunk_rows=2)
        tensor([0, 1, 2])
    """
    if a.ndim != 2 or b.ndim != 2 or chunk_rows < 1:
        raise ValueError(
            "a must be (M, D), b (N, D) and chunk_rows at least 1, "
            f"got {tuple(a.shape)}, {tuple(b.shape)} and {chunk_rows}"
        )

    def reduced(rows: Tensor) -> Tensor:
        return reduce(pairwise_distances(rows, b, squared=squared))

    return torch.cat(
        [checkpoint(reduced, rows, use_reentrant=False) for rows in a.split(chunk_rows)]
    )


class _Distances(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor, squared: bool) -> Tensor:
        with torch.autocast(a.device.type, enabled=False):
            distances = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
        return distances.square_() if squared else distances

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        a, b, ctx.squared = inputs
        ctx.save_for_backward(a, b, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, b, distances = ctx.saved_tensors
        # Division by infinity: a distance of zero has no direction, and pulls nowhere.
        scale = 2.0 if ctx.squared else 1 / distances.masked_fill(distances == 0, torch.inf)
        weights = grad * scale
        # So many rows that their differences, (..., rows, N, D), are no more than the (..., M, N) result.
        rows = max(1, a.shape[-2] // max(1, a.shape[-1]))
        grad_a = []
        grad_b = torch.zeros_like(b)
        for some, weight in zip(a.split(rows, -2), weights.split(rows, -2), strict=True):
            # Differences and no matrix product: exact for close points, in whatever precision those run.
            pulls = weight.unsqueeze(-1) * (some.unsqueeze(-2) - b.unsqueeze(-3))
            if ctx.needs_input_grad[0]:
                grad_a.append(pulls.sum(-2))
            if ctx.needs_input_grad[1]:
                grad_b = grad_b - pulls.sum(-3)
        return torch.cat(grad_a, -2) if grad_a else None, grad_b, None
