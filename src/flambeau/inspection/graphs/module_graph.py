"""The graph of the modules of a model and the tensors between them."""

from dataclasses import dataclass
from typing import Literal

from flambeau.inspection.graphs.recorded_pass import Call, RecordedPass, unit


@dataclass(frozen=True)
class ModuleNode:
    """A call of a module, an operation between them, an input or an output.

    Attributes:
        name: of a module ('' is the model), an operation or an input.
        call: of this module, from 1.
        reads: parameters that an operation takes.
    """

    role: Literal["input", "module", "operation", "output"]
    name: str
    kind: str
    output: tuple[tuple[int, ...], ...]
    call: int = 1
    parameters: int = 0
    reads: tuple[str, ...] = ()
    within: str = ""


@dataclass(frozen=True)
class ModuleGraph:
    """Nodes in the order of the forward pass, and edges as pairs of indices.

    Modules deeper than `depth` belong to the node around them.
    """

    depth: int
    nodes: tuple[ModuleNode, ...]
    edges: tuple[tuple[int, int], ...]


def module_graph(seen: RecordedPass, depth: int) -> ModuleGraph:
    """The graph of a forward pass with modules down to a depth: 0 is the model alone."""
    nodes: list[ModuleNode] = []
    index_of_call: dict[int, int] = {}
    indices: list[int] = []  # the node of each operation
    edges: dict[tuple[int, int], None] = {}
    for operation in seen.operations:
        call = unit(operation.calls, depth)
        if call is None:
            index = len(nodes)
            role: Literal["input", "operation"] = "operation" if operation.calls else "input"
            within = operation.calls[-1].name if operation.calls else ""
            nodes.append(
                ModuleNode(
                    role, operation.name, "", operation.output, reads=operation.reads, within=within
                )
            )
        else:
            index = index_of_call.setdefault(id(call), len(nodes))
            if index == len(nodes):
                nodes.append(_module_node(call))
        indices.append(index)
        edges |= {(indices[s], index): None for s in operation.sources if indices[s] != index}
    for name, tensor, maker in seen.outputs:
        if maker is not None:
            edges[indices[maker], len(nodes)] = None
        nodes.append(ModuleNode("output", name, "", (tuple(tensor.shape),)))
    return _without_dead_ends(ModuleGraph(depth, tuple(nodes), tuple(edges)))


def _without_dead_ends(graph: ModuleGraph) -> ModuleGraph:
    """Remove operations whose result nobody takes, such as what attention keeps for its backward pass."""
    takers: list[set[int]] = [set() for _ in graph.nodes]
    sources: list[list[int]] = [[] for _ in graph.nodes]
    for a, b in graph.edges:
        takers[a].add(b)
        sources[b].append(a)
    todo = list(range(len(graph.nodes)))
    dead = set()
    while todo:
        index = todo.pop()
        if graph.nodes[index].role == "operation" and not takers[index] and index not in dead:
            dead.add(index)
            for source in sources[index]:
                takers[source].discard(index)
            todo += sources[index]
    kept = [index for index in range(len(graph.nodes)) if index not in dead]
    new = {index: number for number, index in enumerate(kept)}
    edges = tuple((new[a], new[b]) for a, b in graph.edges if a in new and b in new)
    return ModuleGraph(graph.depth, tuple(graph.nodes[index] for index in kept), edges)


def _module_node(call: Call) -> ModuleNode:
    return ModuleNode(
        "module",
        call.name,
        type(call.module).__name__,
        call.output,
        call=call.number,
        parameters=sum(p.numel() for p in call.module.parameters()),
    )
