"""The receptive field of every tensor of a convolutional network, followed from operation to operation.

Source: the recurrences of Araujo, Norris, Sim, "Computing receptive fields of convolutional neural networks",
Distill 2019, https://distill.pub/2019/computing-receptive-fields. Branches that meet count as centred.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(frozen=True)
class ReceptiveField:
    """What one position of a tensor depends on.

    Attributes:
        dims: the tensor's dimensions that run over positions.
        size: input pixels along each.
        jump: input pixels from one position to the next.
        merged: sizes of the dimensions that a view merged into the first (a Linear layer works on rows).
    """

    dims: tuple[int, ...]
    size: tuple[float, ...]
    jump: tuple[float, ...]
    merged: tuple[int, ...] = ()


EVERYTHING: Final = ReceptiveField((), (), ())
"""Each position depends on the whole input, as after a mean over all positions."""


class FieldTracker:
    """The receptive field of each tensor that operations have made; None if unknown."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._fields = WeakTensorKeyDictionary()
        for one in inputs:
            if one.ndim >= 3 and one.is_floating_point():
                ones = (1.0,) * (one.ndim - 2)
                self._fields[one] = ReceptiveField(tuple(range(2, one.ndim)), ones, ones)

    def __getitem__(self, tensor: Tensor) -> ReceptiveField | None:
        field: ReceptiveField | None = self._fields.get(tensor)
        return field

    def follow(
        self, operation: Any, args: Sequence[Any], taken: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Record an operation called with `args` that made tensors from others."""
        fields = [self._fields[tensor] for tensor in taken if tensor in self._fields]
        if not fields or not made:
            return
        # Batch normalization also returns its statistics, which no other operation takes.
        field = EVERYTHING if EVERYTHING in fields else _field(operation, fields, args, made[0])
        if field is not None:
            self._fields[made[0]] = field


def _field(
    operation: Any, fields: Sequence[ReceptiveField], args: Sequence[Any], made: Tensor
) -> ReceptiveField | None:
    """The field of an operation's first result; None if unknown."""
    name = operation.name().removeprefix("aten::").partition(".")[0].removeprefix("_")
    rule = RULES.get(name)
    if torch.Tag.pointwise in operation.tags or name == "cat":
        return _together(fields)
    return None if rule is None else rule(fields[0], args, made)


def _together(fields: Sequence[ReceptiveField]) -> ReceptiveField | None:
    """The field where branches meet."""
    first = fields[0]
    if any((f.dims, f.merged) != (first.dims, first.merged) for f in fields):
        return None
    size = tuple(map(max, *(f.size for f in fields))) if len(fields) > 1 else first.size
    return replace(first, size=size)


def _window(
    field: ReceptiveField, kernel: Sequence[float], stride: Sequence[float]
) -> ReceptiveField:
    """The field after a window of `kernel` positions (dilation included) that moves by `stride`."""
    size = tuple(s + (k - 1) * j for s, k, j in zip(field.size, kernel, field.jump, strict=True))
    jump = tuple(j * s for j, s in zip(field.jump, stride, strict=True))
    return replace(field, size=size, jump=jump)


def _each(value: Any, dims: int) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value]
    return values if len(values) == dims else values * dims


def _convolution(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    _, weight, _, stride, _, dilation, transposed, *_ = args
    n = len(field.dims)
    if field.merged or weight.ndim != n + 2:
        return None
    stride, dilation = _each(stride, n), _each(dilation, n)
    kernel = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    if transposed:  # an output gets one input in `stride`
        return _window(
            field,
            [-(-k // s) for k, s in zip(kernel, stride, strict=True)],
            [1 / s for s in stride],
        )
    return _window(field, kernel, stride)


def _pool(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    n = len(field.dims)
    kernel = _each(args[1], n)
    stride = _each(args[2], n) if len(args) > 2 and args[2] else kernel
    return None if field.merged else _window(field, kernel, stride)


def _max_pool(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    n = len(field.dims)
    dilation = _each(args[4], n) if len(args) > 4 else [1] * n
    spread = [d * (k - 1) + 1 for d, k in zip(dilation, _each(args[1], n), strict=True)]
    stride = args[2] if len(args) > 2 and args[2] else args[1]
    return _pool(field, (args[0], spread, _each(stride, n)), made)


def _resize(reach: int) -> Callable[..., ReceptiveField | None]:
    """The rule of an interpolation from `reach` positions per dimension."""

    def rule(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField:
        ratios = [args[0].shape[d] / made.shape[d] for d in field.dims]
        return _window(field, [reach] * len(ratios), ratios)

    return rule


def _adaptive_pool(
    field: ReceptiveField, args: Sequence[Any], made: Tensor
) -> ReceptiveField | None:
    sizes = [(args[0].shape[d], made.shape[d]) for d in field.dims]
    if all(after == 1 for _, after in sizes):
        return EVERYTHING
    if any(before % after for before, after in sizes):  # windows of different sizes
        return None
    kernel = [before // after for before, after in sizes]
    return _window(field, kernel, kernel)


def _reduction(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    """A mean or a sum over some dimensions."""
    ndim = args[0].ndim
    dims = {d % ndim for d in _each(args[1], 1)} if len(args) > 1 and args[1] else set(range(ndim))
    if dims >= set(field.dims):
        return EVERYTHING
    keeps = made.ndim == ndim
    if dims & set(field.dims) or field.merged:
        return None
    return replace(
        field, dims=tuple(d if keeps else d - sum(r < d for r in dims) for d in field.dims)
    )


def _layer_norm(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    first = args[0].ndim - len(args[1])
    return field if all(d < first for d in field.dims) else EVERYTHING


def _softmax(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    return None if args[1] % args[0].ndim in field.dims else field


def _permute(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    order = [d % args[0].ndim for d in args[1]]
    return None if field.merged else replace(field, dims=tuple(map(order.index, field.dims)))


def _transpose(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    order = list(range(args[0].ndim))
    order[args[1]], order[args[2]] = order[args[2]], order[args[1]]
    return _permute(field, (args[0], order), made)


def _view(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    before, after = tuple(args[0].shape), tuple(made.shape)
    if field.merged:
        together = after[: len(field.merged)] == field.merged
        return replace(field, merged=()) if together else field if after == before else None
    dims = []
    for d in field.dims:
        candidates = (
            e
            for e, size in enumerate(after)
            if size == before[d] and prod(after[:e]) == prod(before[:d])
        )
        dims.append(next(candidates, None))
    if None not in dims and len(set(dims)) == len(dims):
        return replace(field, dims=tuple(d for d in dims if d is not None))
    lead = before[: max(field.dims) + 1]
    return replace(field, merged=lead) if after[0] == prod(lead) else None


def _rows(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    """A matrix product whose rows are positions."""
    return field if field.merged and made.shape[0] == prod(field.merged) else None


def _channels(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    """A slice of a dimension that does not run over positions."""
    dim = args[1] % args[0].ndim if len(args) > 1 else 0
    return None if dim in field.dims or field.merged else field


def _unchanged(field: ReceptiveField, args: Sequence[Any], made: Tensor) -> ReceptiveField | None:
    return field


RULES: Final[dict[str, Callable[..., ReceptiveField | None]]] = {
    "convolution": _convolution,
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _pool),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), _max_pool),
    **dict.fromkeys(
        ("adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool2d"), _adaptive_pool
    ),
    **dict.fromkeys(("mean", "sum", "amax"), _reduction),
    **dict.fromkeys(("upsample_nearest2d", "upsample_nearest_exact2d"), _resize(1)),
    "upsample_bilinear2d": _resize(2),
    "upsample_bicubic2d": _resize(4),
    "native_layer_norm": _layer_norm,
    "softmax": _softmax,
    "permute": _permute,
    "transpose": _transpose,
    **dict.fromkeys(("view", "unsafe_view", "reshape"), _view),
    **dict.fromkeys(("addmm", "mm"), _rows),
    **dict.fromkeys(("slice", "split", "split_with_sizes", "chunk"), _channels),
    **dict.fromkeys(("native_batch_norm", "native_batch_norm_legit_no_training"), _unchanged),
    # Pointwise, though not tagged so in all versions of torch.
    **dict.fromkeys(("leaky_relu", "hardswish", "prelu_kernel", "log_sigmoid_forward"), _unchanged),
    **dict.fromkeys(("constant_pad_nd", "reflection_pad2d", "replication_pad2d"), _unchanged),
    **dict.fromkeys(("native_dropout", "clone", "detach", "alias", "to_copy"), _unchanged),
}
"""By the name in torch.ops.aten without a leading underscore; other operations make the field unknown."""
