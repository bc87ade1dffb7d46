"""Figures of tensors, taken without changing them and without random numbers."""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

_MOST_ROWS = 256  # of a batch that are compared by content; chosen
_MOST_BYTES = 2**20  # of a row
_MOST_NODES = 100  # of a sum that are looked through; chosen
_SHAPES_ONLY = (
    "View",
    "Squeeze",
    "Unsqueeze",
    "UnsafeView",
    "ReshapeAlias",
    "Transpose",
    "TBackward",
    "Permute",
    "Select",
    "Slice",
    "Clone",
    "ToCopy",
    "Expand",
    "Diagonal",
)


def made_by(tensor: Tensor) -> str:
    """Name of the autograd node that computed a tensor, below changes of its shape; '' if none did."""
    node = tensor.grad_fn
    while node is not None and node.name().startswith(_SHAPES_ONLY):
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return "" if node is None else node.name()


def is_bare_clamp(tensor: Tensor) -> bool:
    """Whether values were only clamped to a range, and come from no sigmoid or softmax."""
    node = tensor.grad_fn
    clamped = False
    while node is not None and (clamped or node.name().startswith((*_SHAPES_ONLY, "Clamp"))):
        if clamped and not node.name().startswith(_SHAPES_ONLY):
            return not node.name().startswith(("Sigmoid", "Softmax"))
        clamped |= node.name().startswith("Clamp")
        node = next((one for one, _ in node.next_functions if one is not None), None)
    return False


def is_added(total: Tensor, node: Any) -> bool:
    """Whether a tensor is a sum, perhaps weighted, with the result of a node of autograd in it."""
    some = [total.grad_fn]
    for _ in range(_MOST_NODES):
        one = some.pop() if some else None
        if one is None or one is node:
            return one is not None
        if one.name().startswith(("Add", "Mul", "Div")):  # a mean over steps scales its parts
            some += [after for after, _ in one.next_functions if after is not None]
    return False


def is_mean_of_logarithms(loss: Tensor) -> bool:
    """Whether a loss is log_softmax, picked and averaged, with nothing that turns its sign."""
    node = loss.grad_fn
    picks = (*_SHAPES_ONLY, "Mean", "Sum", "Gather", "Index", "Div")
    while node is not None and node.name().startswith(picks):
        node = next((one for one, _ in node.next_functions if one is not None), None)
    if node is not None and node.name().startswith("Sub"):  # log_softmax, written out
        parts = [one.name() for one, _ in node.next_functions if one is not None]
        return len(parts) == 2 and parts[1].startswith("Logsumexp")
    return node is not None and node.name().startswith(("LogSoftmax", "LogSigmoid"))


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Tensors in nested arguments, and in the outputs of transformers, which are mappings."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)


def row_hashes(tensor: Tensor) -> list[int]:
    """A number per sample, equal where the contents are, in any process.

    Empty where samples are too large or too small.
    """
    if tensor.ndim < 1 or not tensor.numel() or tensor.is_sparse or tensor.is_meta:
        return []
    rows = tensor.detach()[:_MOST_ROWS].contiguous().cpu()
    if not 8 <= rows[0].nbytes <= _MOST_BYTES:
        return []
    raw = rows.view(torch.uint8) if rows.ndim > 1 else rows.unsqueeze(1).view(torch.uint8)
    contents = (blake2b(row.numpy().tobytes(), digest_size=8) for row in raw.flatten(1))
    return [int.from_bytes(content.digest()) for content in contents]


def spread_of(tensor: Tensor) -> dict[str, float]:
    values = tensor.detach().double()
    return {
        "low": float(values.min()),
        "high": float(values.max()),
        "mean": float(values.mean()),
        "std": float(values.std(correction=0)),
    }


def is_softmax(tensor: Tensor, dim: int = 1) -> bool:
    """Whether values are probabilities along a dimension."""
    values = tensor.detach().float()
    if values.ndim <= dim or values.shape[dim] < 2 or not values.numel():
        return False
    total = values.sum(dim)
    return bool((values >= 0).all()) and bool(((total - 1).abs() < 2e-3).all())


def is_plain(tensor: Any) -> bool:
    """Whether a value can be measured: a tensor with numbers, and none that stands for others, as in vmap."""
    if not isinstance(tensor, Tensor) or not tensor.numel() or tensor.is_meta:
        return False
    try:
        tensor.data_ptr()
    except RuntimeError:  # of torch.func, or sparse
        return False
    return True
