from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flambeau.recipes.tensors.pairwise_distances import pairwise_distances, reduce_distances


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive(a: Tensor, b: Tensor, *, squared: bool = False) -> Tensor:
    total = (a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1)
    return total if squared else total.sqrt()


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operation gave, forward or backward."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.numel())
        return result


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ((7, 3), (5, 3)),
        ((60, 3), (40, 3)),  # torch.cdist would take matrix products
        ((2, 4, 6, 3), (2, 4, 5, 3)),
        ((2, 1, 6, 3), (4, 5, 3)),  # broadcast
        ((1, 1), (1, 1)),
        ((3, 50), (4, 50)),  # more dimensions than rows
    ],
)
def test_value_and_gradient_of_the_definition(
    of_a: tuple[int, ...], of_b: tuple[int, ...], squared: bool
) -> None:
    a, b = rows(*of_a).requires_grad_(), rows(*of_b, seed=1).requires_grad_()
    found, expected = pairwise_distances(a, b, squared=squared), naive(a, b, squared=squared)
    torch.testing.assert_close(found, expected)
    weight = rows(*expected.shape, seed=2)
    torch.testing.assert_close(
        torch.autograd.grad((weight * found).sum(), (a, b)),
        torch.autograd.grad((weight * expected).sum(), (a, b)),
    )


@pytest.mark.parametrize("side", [0, 1])
def test_gradient_of_one_side_alone(side: int) -> None:
    pair = [rows(5, 2), rows(3, 2, seed=1)]
    pair[side].requires_grad_()
    (found,) = torch.autograd.grad(pairwise_distances(*pair).sum(), pair[side])
    torch.testing.assert_close(found, torch.autograd.grad(naive(*pair).sum(), pair[side])[0])


@pytest.mark.parametrize("squared", [False, True])
def test_both_derivatives_are_right(squared: bool) -> None:
    a, b = rows(5, 2).requires_grad_(), rows(3, 2, seed=1).requires_grad_()

    def call(a: Tensor, b: Tensor) -> Tensor:
        return pairwise_distances(a, b, squared=squared)

    assert torch.autograd.gradcheck(call, (a, b))
    assert torch.autograd.gradgradcheck(call, (a, b))


@pytest.mark.parametrize("squared", [False, True])
def test_distance_zero_has_gradient_zero(squared: bool) -> None:
    a = torch.tensor([[1.0, 2.0], [1.0, 2.0], [4.0, 6.0]], requires_grad=True)
    distances = pairwise_distances(a, a, squared=squared)
    assert distances.diagonal().tolist() == [0.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(distances[0].sum(), a)
    factor = 10.0 if squared else 1.0
    unit = torch.tensor([0.6, 0.8]) * factor
    torch.testing.assert_close(gradient, torch.stack([-unit, 0 * unit, unit]))
    (nan,) = torch.autograd.grad(naive(a, a).sum(), a)
    assert nan.isnan().any()  # what the definition gives, written with a square root


def test_close_points_far_from_the_origin() -> None:
    a, b = (1000 + 0.01 * rows(60, 16, seed=seed, dtype=torch.float32) for seed in (0, 1))
    exact = naive(a.double(), b.double())
    torch.testing.assert_close(pairwise_distances(a, b).double(), exact, rtol=1e-6, atol=0)
    products = torch.cdist(a, b).double()
    assert ((products - exact).abs() / exact).max() > 1  # no digit is right

    def gradient(dtype: torch.dtype, of: Any) -> Tensor:
        x = a.to(dtype).requires_grad_()
        (found,) = torch.autograd.grad(of(x, b.to(dtype)).sum(), x)
        return found.double()

    expected = gradient(torch.float64, naive)
    torch.testing.assert_close(
        gradient(torch.float32, pairwise_distances), expected, rtol=1e-5, atol=1e-5
    )


def test_two_groups_far_apart() -> None:
    """Where centering all rows would not help: the points of each group are close together."""
    close = 0.001 * rows(40, 8, dtype=torch.float32)
    a = torch.cat([close + 500, close - 500])
    exact = naive(a.double(), a.double())
    torch.testing.assert_close(pairwise_distances(a, a).double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("squared", [False, True])
def test_no_tensor_is_larger_than_the_result(squared: bool) -> None:
    a = rows(64, 32, dtype=torch.float32).requires_grad_()
    b = rows(48, 32, seed=1, dtype=torch.float32).requires_grad_()
    with Largest() as largest:
        pairwise_distances(a, b, squared=squared).sum().backward()
    assert largest.elements == 64 * 48
    with Largest() as largest:
        naive(a, b).sum().backward()
    assert largest.elements == 64 * 48 * 32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    a, b = rows(30, 8).to(dtype).requires_grad_(), rows(30, 8, seed=1).to(dtype)
    distances = pairwise_distances(a, b)
    assert distances.dtype == dtype
    assert distances.equal(naive(a.double(), b.double()).float().to(dtype))
    distances.sum().backward()
    assert a.grad is not None
    assert a.grad.dtype == dtype
    with pytest.raises(RuntimeError, match="not implemented for"):
        torch.cdist(a[:3], b[:3])  # of more than 25 rows it takes products


def test_autocast_does_not_round_the_inputs() -> None:
    a, b = rows(30, 8, dtype=torch.float32), rows(30, 8, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = pairwise_distances(a, b)
    assert found.equal(pairwise_distances(a, b))


def test_empty() -> None:
    a = rows(0, 3).requires_grad_()
    pairwise_distances(a, rows(4, 3)).sum().backward()
    assert a.grad is not None
    assert a.grad.shape == (0, 3)
    assert pairwise_distances(rows(2, 0), rows(4, 0)).tolist() == [[0.0] * 4] * 2


@pytest.mark.parametrize("chunk_rows", [1, 7, 60, 100])
def test_chunks_change_nothing(chunk_rows: int) -> None:
    a, b = rows(60, 3).requires_grad_(), rows(40, 3, seed=1).requires_grad_()

    def nearest(distances: Tensor) -> Tensor:
        return distances.min(1).values

    found = reduce_distances(a, b, nearest, chunk_rows=chunk_rows)
    expected = naive(a, b).min(1).values
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), (a, b)), torch.autograd.grad(expected.sum(), (a, b))
    )
    squares = reduce_distances(a, b, nearest, chunk_rows=chunk_rows, squared=True)
    torch.testing.assert_close(squares, expected.square())


def test_chunks_never_hold_all_distances() -> None:
    a = rows(200, 4, dtype=torch.float32).requires_grad_()
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        nearest = reduce_distances(a, a.detach(), lambda d: d.sum(1), chunk_rows=10)
        nearest.sum().backward()
    assert largest.elements == 10 * 200
    assert 200 * 200 not in kept


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (rows(3, 2), rows(3, 4), ValueError, r"same D, got \(3, 2\) and \(3, 4\)"),
        (rows(3), rows(3), ValueError, r"got \(3,\) and \(3,\)"),
        (rows(3, 2), rows(3, 2).float(), TypeError, "got torch.float64 and torch.float32"),
        (torch.ones(3, 2, dtype=torch.int64),) * 2 + (TypeError, "one floating dtype"),
    ],
)
def test_refused(a: Tensor, b: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        pairwise_distances(a, b)


def test_chunks_that_are_refused() -> None:
    for a, chunk_rows in ((rows(3, 2), 0), (rows(1, 3, 2), 2)):
        with pytest.raises(ValueError, match="chunk_rows at least 1"):
            reduce_distances(a, a, lambda d: d.sum(1), chunk_rows=chunk_rows)


@pytest.mark.filterwarnings(  # torch's own, in 2.11
    "ignore:.*should not be instantiated:DeprecationWarning"
)
def test_compiled_in_one_graph() -> None:
    torch.compiler.reset()
    a, b = rows(30, 4).requires_grad_(), rows(20, 4, seed=1)
    compiled = torch.compile(pairwise_distances, backend="aot_eager", fullgraph=True)
    found, expected = compiled(a, b), pairwise_distances(a, b)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), a), torch.autograd.grad(expected.sum(), a)
    )
