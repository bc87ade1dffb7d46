"""Straight-through gradients: round or binarize in the forward pass, and let the gradient through.

直通梯度估计：前向取整或二值化，反向让梯度直接通过。

Source: Bengio et al., "Estimating or propagating gradients through stochastic neurons", 2013; Hubara et al.,
"Binarized neural networks", NeurIPS 2016, section 1.3 (no gradient where |x| > 1).

Not for functions that have a useful gradient of their own: here it is that of the identity.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class StraightThrough(torch.autograd.Function):
    """A function whose gradient is taken to be 1 within [-limit, limit], and 0 outside.

    Call `straight_through`, which checks its arguments. `setup_context` apart from `forward` lets it work in
    torch.func (grad, vmap, jacrev). There is no forward-mode derivative, because torch.compile refuses a
    Function with a `jvp`.

    Example:
        >>> torch.func.grad(lambda x: 3 * StraightThrough.apply(x, torch.round, None))(torch.tensor(0.4))
        tensor(3.)
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, function: Callable[[Tensor], Tensor], limit: float | None) -> Tensor:
        y = function(x)
        return y.clone() if y is x else y  # autograd would take the input itself for a view

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, ctx.limit = inputs
        if ctx.limit is not None:  # else nothing of x is kept
            ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.limit is not None:
            (x,) = ctx.saved_tensors
            # Not a product: infinity times 0 is NaN.
            gradient = torch.where(x.abs() <= ctx.limit, gradient, 0.0)
        return gradient, None, None


def straight_through(
    x: Tensor, function: Callable[[Tensor], Tensor], *, limit: float | None = None
) -> Tensor:
    """The values of `function`, with the gradient of the identity.

    `x + (function(x) - x).detach()` has that gradient too, but it rounds: of the sign of 1000 in bfloat16, 0
    is left.

    Args:
        x: floating, of any shape.
        function: element by element, not in place, to the same shape and dtype: torch.round, a quantization.
        limit: no gradient where |x| is above it. None lets all pass.

    Returns:
        What `function` gives.

    Raises:
        TypeError: x is complex, an integer or no tensor.
        ValueError: `function` changes shape or dtype, or `limit` is not above 0.

    Example:
        >>> x = torch.tensor([0.3, 0.8, 2.6], requires_grad=True)
        >>> y = straight_through(x, torch.round, limit=1.0)
        >>> y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist()
        ([0.0, 1.0, 3.0], [1.0, 1.0, 0.0])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a floating tensor, got {kind}: only real numbers are rounded")
    if limit is not None and not limit > 0:
        raise ValueError(f"limit must be above 0, got {limit}")
    y: Tensor = StraightThrough.apply(x, function, limit)
    if (y.shape, y.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"the function must keep shape and dtype: {list(x.shape)} {x.dtype} became "
            f"{list(y.shape)} {y.dtype}"
        )
    return y


def binarize(x: Tensor, *, limit: float | None = 1.0) -> Tensor:
    """+1 where x is at least 0, else -1, with a straight-through gradient; NaN stays NaN.

    torch.sign would give 0 at 0, and a gradient of 0 everywhere.

    Args:
        x: floating, of any shape.
        limit: no gradient where |x| is above it: 1 after Hubara et al., None lets all pass.

    Returns:
        As x.

    Raises:
        TypeError, ValueError: as `straight_through`.

    Example:
        >>> x = torch.tensor([-3.0, -0.2, 0.0, 0.7], requires_grad=True)
        >>> y = binarize(x)
        >>> y.tolist(), torch.autograd.grad(y.sum(), x)[0].tolist()
        ([-1.0, -1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0])
    """
    return straight_through(x, _plus_or_minus_one, limit=limit)


def _plus_or_minus_one(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, torch.where(x < 0, -1.0, x))
