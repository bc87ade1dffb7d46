"""Values and gradients against the definition, gradcheck where it can hold, and all of torch.func."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

from flambeau.recipes.autograd.straight_through import binarize, straight_through


def gradient_of(y: Tensor, x: Tensor) -> Tensor:
    weights = torch.arange(1, y.numel() + 1).view_as(y).to(y)
    return torch.autograd.grad((y * weights).sum(), x)[0]


@pytest.mark.parametrize("function", [torch.round, torch.floor, torch.ceil, torch.sign])
def test_values_of_the_function_and_gradient_of_the_identity(function: Any) -> None:
    x = torch.tensor([-2.5, -1.0, -0.3, 0.0, 0.5, 1.0, 1.2], requires_grad=True)
    y = straight_through(x, function)
    assert_close(y.detach(), function(x.detach()), rtol=0, atol=0)
    assert gradient_of(y, x).tolist() == [1, 2, 3, 4, 5, 6, 7]
    clipped = straight_through(x, function, limit=1.0)
    assert gradient_of(clipped, x).tolist() == [0, 2, 3, 4, 5, 6, 0]  # as Hubara: |x| <= 1


def test_binarize() -> None:
    x = torch.tensor(
        [-1.5, -1.0, -1e-30, -0.0, 0.0, 1.0, 1.5, math.nan, math.inf], requires_grad=True
    )
    y = binarize(x)
    assert_close(y.detach(), torch.tensor([-1, -1, -1, 1, 1, 1, 1, math.nan, 1]), equal_nan=True)
    assert gradient_of(y, x).tolist() == [0, 2, 3, 4, 5, 6, 0, 0, 0]
    assert gradient_of(binarize(x, limit=None), x).tolist() == [*range(1, 10)]


def test_an_infinite_gradient_outside_the_limit_does_not_become_nan() -> None:
    x = torch.tensor([0.5, 3.0], requires_grad=True)
    (gradient,) = torch.autograd.grad(binarize(x), x, torch.tensor([1.0, math.inf]))
    assert gradient.tolist() == [1, 0]


def test_the_values_are_exact_where_the_detached_sum_is_not() -> None:
    x = torch.tensor([1000.0, math.inf], dtype=torch.bfloat16)
    assert binarize(x).tolist() == [1, 1]
    assert_close(
        (x + (binarize(x) - x).detach()).float(), torch.tensor([0, math.nan]), equal_nan=True
    )


@pytest.mark.parametrize(
    ("function", "limit"), [(lambda x: x + 3, None), (F.hardtanh, 1.0), (lambda x: x, None)]
)
def test_gradcheck_where_the_gradient_is_the_true_one(function: Any, limit: float | None) -> None:
    """Shifts have the slope 1, and hardtanh the clipped one, as long as no point is at a corner."""
    x = torch.tensor([[-2.0, -0.9, -0.2], [0.1, 0.7, 1.8]], dtype=torch.float64, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return straight_through(x, function, limit=limit)

    assert gradcheck(call, (x,), check_batched_grad=True)
    assert gradgradcheck(call, (x,))


def test_gradcheck_cannot_hold_for_rounding() -> None:
    """Differences of round() are 0 between its jumps; the straight-through gradient is 1 by definition."""
    x = torch.tensor([0.2, 0.7], dtype=torch.float64, requires_grad=True)
    assert not gradcheck(lambda x: straight_through(x, torch.round), (x,), raise_exception=False)


def test_twice_backward() -> None:
    """f = round(x)^2 x: f' = 2 round(x) x + round(x)^2; f'' = 2 x + 2 round(x) + 2 round(x)."""
    x = torch.tensor([0.4, 0.8, -0.6], dtype=torch.float64, requires_grad=True)
    r = straight_through(x, torch.round, limit=1.0)
    (first,) = torch.autograd.grad((r**2 * x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert_close(first, 2 * r * x + r**2)
    assert_close(second, 2 * x + 4 * r)


def test_torch_func() -> None:
    x = torch.tensor([[-1.4, 0.4], [0.8, -0.6], [2.2, 0.1]])

    def f(x: Tensor) -> Tensor:
        return (binarize(x) * x).sum()

    expected = torch.where(x.abs() <= 1, x, 0) + binarize(x)
    assert_close(torch.func.grad(f)(x), expected)
    assert_close(torch.func.vmap(torch.func.grad(f))(x), expected)
    assert_close(torch.func.vmap(torch.func.grad(f), in_dims=1, out_dims=1)(x), expected)
    assert_close(torch.func.vmap(binarize)(x), binarize(x))
    assert_close(torch.func.jacrev(f)(x), expected)
    twice = torch.func.grad(lambda x: torch.func.grad(f)(x).sum())
    assert_close(twice(x), torch.where(x.abs() <= 1, 2.0, 0.0))


def test_torch_compile_makes_one_graph() -> None:
    def f(x: Tensor) -> Tensor:
        return straight_through(x, torch.round, limit=1.0) * binarize(x)

    x = torch.tensor([0.4, 0.8, -0.6, 2.2], requires_grad=True)
    compiled: Any = torch.compile(f, backend="aot_eager", fullgraph=True)
    y, expected = compiled(x), f(x)
    assert_close(y, expected)
    assert_close(gradient_of(y, x), gradient_of(expected, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_and_memory_format(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 5).to(dtype=dtype, memory_format=torch.channels_last)
    x.requires_grad_()
    for part in (x, x[:, ::2].transpose(0, 1), x[:0], x[0, 0, 0, 0]):
        y = binarize(part)
        assert (y.dtype, y.shape, y.device) == (dtype, part.shape, part.device)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.dtype == dtype
    assert binarize(x).is_contiguous(memory_format=torch.channels_last)


def test_autocast_and_no_grad() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ binarize(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        assert not binarize(x).requires_grad


def test_a_change_in_place_between_forward_and_backward_is_noticed() -> None:
    x = torch.randn(3, requires_grad=True) * 1
    y = binarize(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("x", "settings", "kind", "message"),
    [
        (torch.ones(2, dtype=torch.complex64), {}, TypeError, "a floating tensor, got torch.complex64"),
        (torch.ones(2, dtype=torch.int64), {}, TypeError, "a floating tensor, got torch.int64"),
        (1.5, {}, TypeError, "a floating tensor, got float"),
        (torch.ones(2), {"limit": 0.0}, ValueError, r"limit must be above 0, got 0\.0"),
        (torch.ones(2), {"limit": math.nan}, ValueError, "limit must be above 0, got nan"),
    ],
)  # fmt: skip
def test_refusals(x: Any, settings: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        binarize(x, **settings)


@pytest.mark.parametrize("function", [torch.Tensor.int, torch.Tensor.sum, torch.Tensor.double])
def test_a_function_that_changes_shape_or_dtype_is_refused(function: Any) -> None:
    with pytest.raises(ValueError, match=r"must keep shape and dtype: \[2\] torch.float32 became"):
        straight_through(torch.ones(2), function)
