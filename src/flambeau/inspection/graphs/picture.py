"""Both graphs of a model side by side in one SVG picture."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

from torch import nn

from flambeau.inspection.graphs.autograd_graph import (
    AutogradGraph,
    AutogradNode,
    autograd_graph,
    by_module,
)
from flambeau.inspection.graphs.layered_layout import Layout, layered_layout
from flambeau.inspection.graphs.module_graph import ModuleGraph, ModuleNode, module_graph
from flambeau.inspection.graphs.recorded_pass import RecordedPass, record
from flambeau.report.svg import LINE, SIZE, Picture, element, label, titled, width_of

MOST_NODES = 1500  # of a graph that is drawn: some seconds
_GOOD = 450  # nodes up to which everything is shown, unless a depth is given
_LONGEST = (
    40  # characters of a name; longer ones lose their beginning, those of operations their end
)
_PAD = 6.0  # pixels between a box and its text
_MARGIN = 24.0
_HEAD = 64.0  # pixels for the lines above the graphs
_LINE = "#777"
_SHAPES = 3  # shown in a node; also the most notes of one kind
_NOTED = 40  # lines of a tooltip
_TOO_MANY = "{0}: drawn to depth {1}, as depth {2} has more than {3:,} nodes"


@dataclass(frozen=True)
class ModelGraphs:
    """Both graphs of one forward pass; `deepest`: depth of the deepest called module.

    `notes`: sentences on where the picture is not as requested.
    """

    name: str
    training: bool
    deepest: int
    modules: ModuleGraph
    autograd: AutogradGraph
    notes: tuple[str, ...]

    @property
    def kept_bytes(self) -> int:
        """What autograd keeps for the backward pass, except parameters, buffers and inputs."""
        return sum(node.kept_bytes for node in self.autograd.nodes)


def model_graphs(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    depth: int | None = None,
) -> ModelGraphs:
    """The graphs of a forward pass in training mode; the model, which may be on 'meta', is not changed.

    Only shapes and dtypes count, unless the model reads values. `depth`: down to which modules are boxes and
    group autograd's nodes; None for the deepest that is readable.
    """

    def read(seen: RecordedPass) -> ModelGraphs:
        notes: list[str] = []
        if not seen.training:
            notes.append("in evaluation mode: in training mode the model refuses this input")
        if seen.values:
            notes.append("the model reads values of its tensors: with another input it may differ")
        deepest = max((len(o.calls) and o.calls[-1].depth for o in seen.operations), default=0)
        most = _GOOD if depth is None else MOST_NODES
        levels = range(deepest if depth is None else min(depth, deepest), -1, -1)
        full = autograd_graph(seen)
        # Node by node, unless a depth is given; then by module, at smaller and smaller depths.
        by_modules = (by_module(full, seen, level) for level in levels)
        modules = _fitting((module_graph(seen, level) for level in levels), most)
        nodes = _fitting(chain([full], by_modules) if depth is None else by_modules, most)
        if depth is not None:
            for what, drawn in (("modules", modules.depth), ("autograd graph", nodes.depth)):
                if drawn != levels[0]:
                    notes.append(_TOO_MANY.format(what, drawn, levels[0], MOST_NODES))
        notes += [
            f"a backward pass fails: what {one.name} in {one.module or 'the model'} keeps is changed in place"
            for one in full.nodes
            if one.changed
        ][:_SHAPES]
        name = type(seen.model).__name__
        return ModelGraphs(name, seen.training, deepest, modules, nodes, tuple(notes))

    return record(model, args, kwargs or {}, read)


_Graph = TypeVar("_Graph", ModuleGraph, AutogradGraph)


def _fitting(graphs: Iterable[_Graph], most: int) -> _Graph:
    """The first graph of at most `most` nodes, or of MOST_NODES if otherwise the model were one box."""
    drawable: _Graph | None = None
    for graph in graphs:
        if drawable is None and len(graph.nodes) <= MOST_NODES:
            drawable = graph
        if len(graph.nodes) <= most and (graph.depth != 0 or drawable is graph):
            return graph
    assert drawable is not None  # the last is of a few nodes
    return drawable


@dataclass(frozen=True)
class _Box:
    lines: tuple[str, ...]
    note: str
    fill: str
    border: str
    radius: int = 3  # of the corners, pixels

    @property
    def size(self) -> tuple[float, float]:
        width = max(map(width_of, self.lines)) + 2 * _PAD
        return width, len(self.lines) * LINE + _PAD


def svg_of_graphs(graphs: ModelGraphs) -> str:
    """Draw both: modules on the left, autograd's graph on the right."""
    modules = [_module_box(node) for node in graphs.modules.nodes]
    most = max((node.kept_bytes for node in graphs.autograd.nodes), default=0)
    nodes = [_autograd_box(node, most) for node in graphs.autograd.nodes]
    layouts = [
        layered_layout([box.size for box in boxes], edges)
        for boxes, edges in ((modules, graphs.modules.edges), (nodes, graphs.autograd.edges))
    ]
    heads = [_module_head(graphs), _autograd_head(graphs)]
    widths = [
        max(layout.width, *(width_of(line) * 1.1 for line in head))
        for layout, head in zip(layouts, heads, strict=True)
    ]
    top = _HEAD + LINE * len(graphs.notes)
    picture = Picture(
        sum(widths) + 4 * _MARGIN,
        max(layout.height for layout in layouts) + top + _MARGIN,
        title=f"{graphs.name}: modules and autograd graph",
        description=f"Left: {heads[0][1]}. Right: {heads[1][1]}. The forward pass goes from top to bottom.",
    )
    for number, note in enumerate(graphs.notes):
        picture.label(_MARGIN, _MARGIN + 2 * LINE + number * LINE + SIZE, note, fill="#a00")
    left = _MARGIN
    for layout, boxes, head, width in zip(layouts, (modules, nodes), heads, widths, strict=True):
        picture.label(left, _MARGIN, head[0], font_weight="bold", font_size=SIZE + 2)
        picture.label(left, _MARGIN + LINE, head[1])
        _draw(picture, layout, boxes, (left + (width - layout.width) / 2, top))
        left += width + 2 * _MARGIN
    return picture.text()


def _module_head(graphs: ModelGraphs) -> tuple[str, str]:
    modules = sum(node.role == "module" for node in graphs.modules.nodes)
    others = sum(node.role == "operation" for node in graphs.modules.nodes)
    return (
        f"Modules of {graphs.name}",
        f"{modules} calls of modules{_depth(graphs, graphs.modules.depth)}, {others} operations between them",
    )


def _depth(graphs: ModelGraphs, depth: int) -> str:
    return "" if depth == graphs.deepest else f" (to depth {depth} of {graphs.deepest})"


def _autograd_head(graphs: ModelGraphs) -> tuple[str, str]:
    graph = graphs.autograd
    leaves = sum(node.leaves for node in graph.nodes)
    count = sum(node.nodes for node in graph.nodes)
    shown = "" if graph.depth is None else f", by module{_depth(graphs, graph.depth)}"
    return (
        f"Autograd graph, {'training' if graphs.training else 'evaluation'} mode",
        f"{_counts(count - leaves, leaves)}{shown}; {size_text(graphs.kept_bytes)} kept",
    )


def _draw(
    picture: Picture, layout: Layout, boxes: Sequence[_Box], corner: tuple[float, float]
) -> None:
    left, top = corner
    for line in layout.lines:
        moved = [(x + left, y + top) for x, y in line]
        picture.curve(moved, color=_LINE)
    for box, (x, y) in zip(boxes, layout.centers, strict=True):
        width, height = box.size
        corner_x = x + left - width / 2
        corner_y = y + top - height / 2
        outline = element(
            "rect",
            x=corner_x,
            y=corner_y,
            width=width,
            height=height,
            rx=box.radius,
            fill=box.fill,
            stroke=box.border,
        )
        lines = (
            label(
                x + left,
                corner_y + _PAD / 2 + number * LINE + SIZE,
                text,
                text_anchor="middle",
                font_weight=None if number else "bold",
            )
            for number, text in enumerate(box.lines)
        )
        picture.add(titled(box.note, outline, *lines))


def _module_box(node: ModuleNode) -> _Box:
    shapes = " ".join(shape_text(shape) for shape in node.output[:_SHAPES])
    shapes += " ..." if len(node.output) > _SHAPES else ""
    name = _short(node.name) or {"module": "(model)", "output": "output"}.get(node.role, "")
    if node.role == "module":
        name += f" (call {node.call})" if node.call > 1 else ""
        note = f"{node.name or '(model)'}: {node.kind}\n{node.parameters:,} parameters\noutput {shapes}"
        return _Box((name, f"{node.kind} {shapes}"), note, "#e8f0fe", "#4a6fa5")
    if node.role == "operation":
        name = node.name if len(node.name) <= _LONGEST else f"{node.name[: _LONGEST - 3]}..."
        reads = tuple(_short(one) for one in node.reads[:2])
        note = f"operation {node.name} in {node.within or 'the model'}\noutput {shapes}" + "".join(
            f"\nof {r}" for r in node.reads
        )
        lines = (f"{name} {shapes}",) if len(node.output) == 1 else (name, shapes)
        return _Box((*lines, *reads), note, "#fff", "#999", 9)
    word = "" if node.role == "input" or not node.name else "output "
    return _Box((f"{word}{name}", shapes), f"{node.role} {node.name} {shapes}", "#eee", "#555", 9)


def _autograd_box(node: AutogradNode, most: int) -> _Box:
    if node.leaf:
        shape = shape_text(node.shape)
        where = f"leaf {node.name} {shape}: its gradient is in .grad"
        return _Box((_short(node.name), shape), where, "#e3f4e1", "#5a9a55", 9)
    name = node.name if node.nodes == 1 else _short(node.name) or "(model)"
    lines = [name]
    if node.nodes > 1:
        lines.append(_counts(node.nodes - node.leaves, node.leaves))
    elif node.module:
        lines.append(_short(node.module))
    if node.changed:
        lines.append("changed in place since")
    if node.kept_bytes:
        lines.append(f"keeps {size_text(node.kept_bytes)}")
    note = [name + (f" in {node.module}" if node.module and node.nodes == 1 else "")]
    note += [_saved_text(one) for one in node.saved[:_NOTED] if node.nodes == 1 or one.size_bytes]
    return _Box(tuple(lines), "\n".join(note), _shade(node.kept_bytes, most), "#a8712d")


def _counts(operations: int, leaves: int) -> str:
    words = [f"{operations:,} operation{'' if operations == 1 else 's'}"]
    if leaves:
        words.append(f"{leaves:,} {'leaf' if leaves == 1 else 'leaves'}")
    return ", ".join(words)


def _saved_text(one: Any) -> str:
    what = size_text(one.size_bytes) if one.size_bytes else one.of or "kept by another one already"
    return f"keeps {one.name} {shape_text(one.shape)} {one.dtype}: {what}"


def _shade(size: int, most: int) -> str:
    """From white for nothing to orange for the most."""
    share = size / most if most else 0.0
    green, blue = round(250 - 90 * share), round(240 - 180 * share)
    return f"#ff{green:02x}{blue:02x}"


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"...{name[3 - _LONGEST :]}"


def shape_text(shape: Sequence[int]) -> str:
    """2x3x4; 'number' for a tensor without dimensions."""
    return "x".join(map(str, shape)) or "number"


def size_text(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} bytes"
