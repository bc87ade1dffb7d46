"""The graph that autograd has made of a forward pass: its operations, its leaves, and what they keep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flambeau.inspection.graphs.recorded_pass import RecordedPass, unit
from flambeau.inspection.watched_forward import storage_key, tensors_of

_AGAIN = "computed again in the backward pass"
_CHANGED = "modified by an inplace operation"  # in torch's message


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that a node keeps for the backward pass.

    Attributes:
        name: for the node, such as 'self', 'weight', 'result'.
        size_bytes: of its storage, 0 if an earlier node keeps that, too, or it is there anyway.
        of: the parameter, buffer or input that it is part of, '' if none; or that it is computed again.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    of: str = ""


@dataclass(frozen=True)
class AutogradNode:
    """A node of the graph, or all nodes of one call of a module.

    Attributes:
        name: such as 'ConvolutionBackward0', a parameter for a leaf, a module for several nodes.
        module: in which it was made, '' for the model.
        leaf: gradients are accumulated in its `.grad`.
        changed: a kept tensor was changed in place, so a backward pass fails here.
    """

    name: str
    module: str
    leaf: bool = False
    shape: tuple[int, ...] = ()
    saved: tuple[SavedTensor, ...] = ()
    nodes: int = 1
    leaves: int = 0
    changed: bool = False

    @property
    def kept_bytes(self) -> int:
        """The size of what only this graph keeps; a storage counts at its first node."""
        return sum(one.size_bytes for one in self.saved)


@dataclass(frozen=True)
class AutogradGraph:
    """Nodes in the order of the forward pass, and edges as pairs of indices in the same direction.

    Attributes:
        depth: of the modules by which nodes are grouped, if any.
    """

    depth: int | None
    nodes: tuple[AutogradNode, ...]
    edges: tuple[tuple[int, int], ...]


def autograd_graph(seen: RecordedPass) -> AutogradGraph:
    """The graph of a forward pass, node by node; empty if no parameter needs a gradient."""
    order = _in_order([tensor.grad_fn for _, tensor, _ in seen.outputs])
    index = {node: number for number, node in enumerate(order)}
    read = _Reader(seen)
    edges = {
        (index[source], index[node]): None
        for node in order
        for source, _ in node.next_functions
        if source is not None
    }
    with read.again:
        nodes = tuple(read.node(node) for node in order)
    return AutogradGraph(None, nodes, tuple(edges))


def by_module(graph: AutogradGraph, seen: RecordedPass, depth: int) -> AutogradGraph:
    """The graph with its nodes grouped by module, down to a depth."""
    order = _in_order([tensor.grad_fn for _, tensor, _ in seen.outputs])
    nodes: list[AutogradNode] = []
    index_of_unit: dict[int, int] = {}
    indices = [-1] * len(order)
    taken_by = dict(reversed(graph.edges))  # the first node that takes from each
    # A leaf belongs to the call that uses it first.
    calls = [seen.nodes.get(node, ()) for node in order]
    for number, node in enumerate(graph.nodes):
        inside = calls[taken_by.get(number, number)] if node.leaf else calls[number]
        call = unit(inside, depth)
        key = -1 - number if call is None else id(call)
        indices[number] = index_of_unit.setdefault(key, len(nodes))
        if indices[number] == len(nodes):
            nodes.append(node)
        else:
            assert call is not None
            so_far = nodes[indices[number]]
            nodes[indices[number]] = AutogradNode(
                call.name,
                call.name,
                saved=so_far.saved + node.saved,
                nodes=so_far.nodes + 1,
                leaves=so_far.leaves + node.leaves,
            )
    edges = {(indices[a], indices[b]): None for a, b in graph.edges if indices[a] != indices[b]}
    return AutogradGraph(depth, tuple(nodes), tuple(edges))


def _in_order(roots: list[Any]) -> list[Any]:
    """All nodes, each after those whose results it takes."""
    order: dict[Any, None] = {}
    todo = [(node, False) for node in reversed(roots) if node is not None]
    seen = set()
    while todo:
        node, done = todo.pop()
        if done:
            order[node] = None
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            sources = [one for one, _ in node.next_functions if one is not None]
            todo += [(one, False) for one in reversed(sources) if one not in seen]
    return list(order)


class _Again(TorchDispatchMode):
    """Collects tensors made while saved ones are read: a checkpointed segment runs again then."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: dict[
            int, Tensor
        ] = {}  # by storage; kept alive, so that no other storage gets its key

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = set(map(storage_key, tensors_of((args, kwargs))))
        self.made |= {key: t for t in tensors_of(out) if (key := storage_key(t)) not in given}
        return out


class _Reader:
    """Reads nodes one after the other, and remembers the storages that it has counted."""

    def __init__(self, seen: RecordedPass) -> None:
        self._calls = seen.nodes
        named: dict[str, Sequence[tuple[str, Tensor]]] = {
            "input": seen.inputs,
            "buffer": [*seen.model.named_buffers()],
            "parameter": [*seen.model.named_parameters()],
        }
        self._names = {id(tensor): name for pairs in named.values() for name, tensor in pairs}
        self._kinds = {
            storage_key(tensor): f"{kind} {name}"
            for kind, pairs in named.items()
            for name, tensor in pairs
        }
        self._kept: set[int] = set()
        self.again = _Again()

    def node(self, node: Any) -> AutogradNode:
        calls = self._calls.get(node, ())
        module = calls[-1].name if calls else ""
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            name = self._names.get(id(variable), "a tensor")
            return AutogradNode(name, module, leaf=True, shape=tuple(variable.shape), leaves=1)
        try:
            saved = tuple(self._saved(name, tensor) for name, tensor in _kept_by(node))
        except RuntimeError as error:
            if _CHANGED not in str(error):
                raise
            return AutogradNode(node.name(), module, changed=True)
        return AutogradNode(node.name(), module, saved=saved)

    def _saved(self, name: str, tensor: Tensor) -> SavedTensor:
        key = storage_key(tensor)
        size = tensor.untyped_storage().nbytes()
        of = self._kinds.get(key, _AGAIN if key in self.again.made else "")
        if of or key in self._kept:
            size = 0
        self._kept.add(key)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return SavedTensor(name, tuple(tensor.shape), dtype, size, of)


def _kept_by(node: Any) -> Iterator[tuple[str, Tensor]]:
    """The saved tensors of a node by name: `_saved_NAME` (torch: 'Autograd mechanics, saved tensors')."""
    saved: dict[str, Any] = {
        name.removeprefix("_saved_"): getattr(node, name)
        for name in dir(node)
        if name.startswith("_saved_")
    }
    for number, tensor in enumerate(getattr(node, "saved_tensors", ())):  # of an autograd.Function
        saved[f"tensor {number}"] = tensor
    for name, value in saved.items():
        several = isinstance(value, list | tuple)
        for number, one in enumerate(value if several else [value]):
            if isinstance(one, Tensor):
                yield f"{name}[{number}]" if several else name, one
