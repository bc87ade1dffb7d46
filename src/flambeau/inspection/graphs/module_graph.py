"""The modules of a model and the data that go from one to the next."""

from dataclasses import dataclass
from typing import Literal

from flambeau.inspection.graphs.recorded_pass import Call, RecordedPass, unit


@dataclass(frozen=True)
class ModuleNode:
    """A call of a module, an operation between them, an input or an output.

    Attributes:
        role: which of these.
        name: of the module in the model ('' is the model), of the operation, of the input.
        kind: the class of a module, '' otherwise.
        call: which call of this module, from 1.
        output: shapes of the tensors that come out of it.
        parameters: numbers, of a module.
        reads: names of the parameters that an operation between modules takes.
        within: of an operation the module that it is in.
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
    """Nodes in the order of the forward pass, and the tensors from one to another.

    Attributes:
        depth: down to which modules are shown; what is in a deeper one belongs to the one shown.
        nodes: in order.
        edges: pairs of places in `nodes`.
    """

    depth: int
    nodes: tuple[ModuleNode, ...]
    edges: tuple[tuple[int, int], ...]


def module_graph(seen: RecordedPass, depth: int) -> ModuleGraph:
    """Of a forward pass, with modules shown down to a depth: 0 is the model alone."""
    nodes: list[ModuleNode] = []
    place_of_call: dict[int, int] = {}
    places: list[int] = []  # of the operations
    edges: dict[tuple[int, int], None] = {}
    for operation in seen.operations:
        call = unit(operation.calls, depth)
        if call is None:
            place = len(nodes)
            role: Literal["input", "operation"] = "operation" if operation.calls else "input"
            within = operation.calls[-1].name if operation.calls else ""
            nodes.append(
                ModuleNode(
                    role, operation.name, "", operation.output, reads=operation.reads, within=within
                )
            )
        else:
            place = place_of_call.setdefault(id(call), len(nodes))
            if place == len(nodes):
                nodes.append(_of_module(call))
        places.append(place)
        edges |= {(places[s], place): None for s in operation.sources if places[s] != place}
    for name, tensor, maker in seen.outputs:
        if maker is not None:
            edges[places[maker], len(nodes)] = None
        nodes.append(ModuleNode("output", name, "", (tuple(tensor.shape),)))
    return _without_dead_ends(ModuleGraph(depth, tuple(nodes), tuple(edges)))


def _without_dead_ends(graph: ModuleGraph) -> ModuleGraph:
    """Without operations whose result nobody takes: what attention keeps for its backward pass, for one."""
    takers: list[set[int]] = [set() for _ in graph.nodes]
    sources: list[list[int]] = [[] for _ in graph.nodes]
    for a, b in graph.edges:
        takers[a].add(b)
        sources[b].append(a)
    todo = list(range(len(graph.nodes)))
    dead = set()
    while todo:
        place = todo.pop()
        if graph.nodes[place].role == "operation" and not takers[place] and place not in dead:
            dead.add(place)
            for source in sources[place]:
                takers[source].discard(place)
            todo += sources[place]
    kept = [place for place in range(len(graph.nodes)) if place not in dead]
    new = {place: number for number, place in enumerate(kept)}
    edges = tuple((new[a], new[b]) for a, b in graph.edges if a in new and b in new)
    return ModuleGraph(graph.depth, tuple(graph.nodes[place] for place in kept), edges)


def _of_module(call: Call) -> ModuleNode:
    return ModuleNode(
        "module",
        call.name,
        type(call.module).__name__,
        call.output,
        call=call.number,
        parameters=sum(p.numel() for p in call.module.parameters()),
    )
