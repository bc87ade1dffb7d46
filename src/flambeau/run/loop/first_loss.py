"""What looks wrong in the first loss of a run, read off the graph that its backward pass will follow.

Nothing is hooked or run again: tensors that hooks give back, as those of a checkpointed part, are not looked
at. What a compiled model computes inside is not seen; its loss is.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

_MOST_NODES = 20_000
_LAYERS = 4  # whose inputs are looked at
_LARGE = 100  # of inputs; as `flambeau doctor --learning` has it
_SAME_VALUES = {"ToCopyBackward0", "CloneBackward0"}
_SAME_NUMBERS = _SAME_VALUES | {
    f"{name}Backward{number}"
    for name in ("Squeeze", "Unsqueeze", "View", "UnsafeView", "Permute", "Transpose")
    for number in (0, 1)
}
_NORMS = ("NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm", "NativeGroupNorm")
_LOGITS = {"AddmmBackward0", "MmBackward0", "ConvolutionBackward0"}
_OUTPUTS = _LOGITS | {"SigmoidBackward0", "ReluBackward0"}
_DIFFERENCES = {"SubBackward0", "RsubBackward1"}
# Of a layer the place of its input among the next functions, and where it is saved.
_FIRST_LAYERS: dict[str, tuple[int, Callable[[Any], Any]]] = {
    "ConvolutionBackward0": (0, lambda layer: layer._raw_saved_input),
    "AddmmBackward0": (1, lambda layer: layer._raw_saved_mat1),
    "MmBackward0": (0, lambda layer: layer._raw_saved_self),
}
_MIXED_UP = {
    ("LogSoftmaxBackward0", "SoftmaxBackward0"): (
        "cross_entropy gets probabilities, and takes softmax itself: give it the outputs of the last layer, "
        "without softmax"
    ),
    ("LogSoftmaxBackward0", "SigmoidBackward0"): (
        "cross_entropy gets the outputs of a sigmoid, which are no logits: give it the outputs of the last "
        "layer"
    ),
    ("LogSoftmaxBackward0", "ReluBackward0"): (
        "cross_entropy gets the outputs of a ReLU, which has no logits below 0: give it the outputs of the "
        "last layer"
    ),
    ("BinaryCrossEntropyWithLogitsBackward0", "SigmoidBackward0"): (
        "binary_cross_entropy_with_logits gets the outputs of a sigmoid, and takes it itself: leave it out"
    ),
    ("NllLossBackward0", "SoftmaxBackward0"): (
        "nll_loss gets probabilities, of which it takes no logarithms: write log_softmax in place of softmax"
    ),
    **{
        ("NllLossBackward0", logits): (
            "nll_loss gets the outputs of a layer, of which it takes no logarithms: use cross_entropy"
        )
        for logits in _LOGITS
    },
}


def suspicious_lines(loss: Tensor) -> list[str]:
    """A line for the user for each suspicious thing; waits for the device a few times.

    Args:
        loss: 0-d, the mean over a batch, before its backward pass.
    """
    try:
        return list(_lines(loss))
    except (AttributeError, RuntimeError):  # the graph was freed by another backward pass
        return []


def _lines(loss: Tensor) -> Iterator[str]:
    if loss.grad_fn is None:
        return
    edges = _edges(loss.grad_fn)
    causes = list(dict.fromkeys([*_mixed_up(edges), *_broadcast(edges), *_inputs(edges)]))
    yield from causes
    if not causes:
        yield from _far_value(loss)


def _edges(root: Node) -> list[tuple[Node, Node]]:
    """What was computed from what: (result, one of its inputs), nearest to the loss first."""
    seen = {root}
    nodes = [root]
    edges = []
    for node in nodes:
        for following, _ in node.next_functions:
            if following is None:
                continue
            edges.append((node, following))
            if following not in seen and len(nodes) < _MOST_NODES:
                seen.add(following)
                nodes.append(following)
    return edges


def _plain(node: Any, copies: Collection[str] = _SAME_VALUES) -> Any:
    """The node that computed the values which this one only copies."""
    while node.name() in copies and node.next_functions[0][0]:
        node = node.next_functions[0][0]
    return node


def _mixed_up(edges: Sequence[tuple[Node, Node]]) -> Iterator[str]:
    for node, following in edges:
        before = _plain(following)
        line = _MIXED_UP.get((node.name().replace("NllLoss2D", "NllLoss"), before.name()))
        are_softmaxes = node.name().startswith("Log") and before.name() == "SoftmaxBackward0"
        if line and not (are_softmaxes and _dim(node) != _dim(before)):
            yield line


def _dim(softmax: Any) -> int:
    """Its dimension, which torch saves as a number of 64 bits without a sign."""
    dim: int = softmax._saved_dim
    return dim if dim < 1 << 63 else dim - (1 << 64) + len(_shape(softmax))


def _broadcast(edges: Sequence[tuple[Node, Node]]) -> Iterator[str]:
    """A difference of outputs (N, 1) and targets (N,), which has the shape (N, N)."""
    for node, following in edges:
        if node.name() not in _DIFFERENCES or following.name() not in _OUTPUTS:
            continue
        has_targets = any(other is None for other, _ in node.next_functions)
        size = _shape(following)[0] if _shape(following) else 1
        if (
            has_targets
            and _shape(following) == (size, 1)
            and _shape(node) == (size, size) != (1, 1)
        ):
            yield (
                f"the difference of outputs of shape {(size, 1)} and targets has the shape {(size, size)}: "
                "each output meets the target of every sample; give both the same shape, as by "
                "outputs.squeeze(1)"
            )
            return


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in node._input_metadata[0].shape)


def _inputs(edges: Sequence[tuple[Node, Node]]) -> Iterator[str]:
    """What the first layers with weights read: numbers of a usual size, and not the same for each sample."""
    inputs = _first_inputs(edges)
    targets = _targets(edges)
    labels_differ = targets is not None and len(targets.unique()) > 1
    if inputs and labels_differ and all(len(one) > 1 and _has_equal_rows(one) for one in inputs):
        yield (
            f"all {len(inputs[0])} samples of the first batch are equal, and their labels are not: look "
            "whether one buffer is returned for each sample"
        )
        return
    for one in inputs:
        low, high = float(one.amin()), float(one.amax())
        if max(-low, high) >= _LARGE and _size(one) >= _LARGE / 5:
            yield (
                f"the first layer reads numbers from {low:.4g} to {high:.4g}: scale inputs to mean 0 and "
                "deviation 1 (images: divide by 255 first)"
            )
            return


def _has_equal_rows(values: Tensor) -> bool:
    """All rows are equal, and not one number throughout, as the first state of an LSTM is."""
    first = values[0]
    if not torch.equal(first, values[1]) or bool((first == first.flatten()[0]).all()):
        return False
    return bool((values == first).all())


def _size(values: Tensor) -> float:
    """The root mean square, without a copy of the values."""
    return float(torch.linalg.vector_norm(values, dtype=torch.float32)) / math.sqrt(values.numel())


def _first_inputs(edges: Sequence[tuple[Node, Node]]) -> list[Tensor]:
    """Of the last few layers whose input needs no gradient, and which no normalization follows."""
    normalized = {
        _plain(layer, _SAME_NUMBERS) for norm, layer in edges if norm.name().startswith(_NORMS)
    }
    found = []
    for layer in dict.fromkeys(following for _, following in edges):
        place, saved = _FIRST_LAYERS.get(layer.name(), (0, None))
        if saved is None or layer.next_functions[place][0] is not None or layer in normalized:
            continue
        value = _kept(saved(layer))
        if value is not None and value.dim() > 1 and value.numel() and value.is_floating_point():
            found.append(value)
    return found[:_LAYERS]


def _targets(edges: Sequence[tuple[Node, Node]]) -> Tensor | None:
    for node, _ in edges:
        if node.name().startswith("NllLoss"):
            loss: Any = node
            return _kept(loss._raw_saved_target)
    return None


def _far_value(loss: Tensor) -> Iterator[str]:
    root: Any = _plain(loss.grad_fn)
    if root.name() == "MseLossBackward0":
        yield from _far_targets(root)
    logs = root.next_functions[0][0] if root.name().startswith("NllLoss") else None
    if (
        logs is None
        or logs.name() != "LogSoftmaxBackward0"
        or root._raw_saved_weight.data is not None
    ):
        return
    value = loss.detach().item()
    chance = math.log(_shape(logs)[1]) if len(_shape(logs)) > 1 else math.inf
    if value > 5 * chance + 2:
        yield (
            f"the first loss is {value:.3g}, and chance gives {chance:.3g}: start with smaller "
            "weights in the last layer, and scale the inputs"
        )


def _far_targets(root: Any) -> Iterator[str]:
    output, target = _kept(root._raw_saved_self), _kept(root._raw_saved_target)
    if output is None or target is None:
        return
    outputs, targets = _size(output), _size(target)
    if targets > 100 * max(outputs, 1):
        yield (
            f"targets are {targets:.3g} in the root mean square, and outputs {outputs:.3g}: scale the "
            "targets to mean 0 and deviation 1"
        )


def _kept(saved: Any) -> Tensor | None:
    """What autograd has saved; None if it is freed, or a hook gives it back, which may do so only once."""
    value: Tensor | None = saved.data
    return None if value is None or saved.unpack_hook is not None else value.detach()
