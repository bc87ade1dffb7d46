"""Draws a graph without circles in layers from top to bottom, with few crossings: where each node lies.

Source: Sugiyama, Tagawa, Toda, "Methods for visual understanding of hierarchical system structures", IEEE
Trans. SMC 11 (2), 1981: layers by the longest path, order by barycenters. Edges of one node that
span several layers share one line, from which they branch off. Within a layer, isotonic regression puts the
nodes as near to their neighbors as order and distance allow.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

_APART = 14.0  # pixels between two nodes of a layer
_LANE = 10.0  # ... around a line that passes a layer
_BETWEEN = 24.0  # pixels between two layers
_SWEEPS = 12  # over the layers, for order and for positions; fewer where there are many nodes
# Weight of a node at an end of the graph, where others have 1; chosen by eye.
_END = 0.02
_WORK = 400_000  # nodes times sweeps; seconds


@dataclass(frozen=True)
class Layout:
    """In pixels: (x, y) of each node's centre, and each edge's points, from lower to upper side."""

    width: float
    height: float
    centers: tuple[tuple[float, float], ...]
    lines: tuple[tuple[tuple[float, float], ...], ...]


@dataclass
class _Net:
    """Nodes and the points at which lines pass a layer; each link goes to the next layer."""

    widths: list[float]
    layers: list[list[int]]
    above: list[list[int]]
    below: list[list[int]]
    routes: list[list[int]]  # the nodes and points of each edge


def layered_layout(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]]
) -> Layout:
    """Arrange nodes of (width, height) pixels and their edges; a circle is cut somewhere."""
    if not sizes:
        return Layout(0.0, 0.0, (), ())
    order = _topological(len(sizes), edges)
    rank = {node: number for number, node in enumerate(order)}
    forward = [(a, b) if rank[a] < rank[b] else (b, a) for a, b in edges]
    net = _net(sizes, forward, _layers(order, forward))
    sweeps = max(2, min(_SWEEPS, _WORK // len(net.widths)))
    _sort_layers(net, sweeps)
    xs = _across(net, sweeps)
    left = min(x - width / 2 for x, width in zip(xs, net.widths, strict=True))
    xs = [x - left for x in xs]
    ys = [0.0] * len(xs)
    heights = []
    y = 0.0
    for layer in net.layers:
        heights.append(max((sizes[n][1] for n in layer if n < len(sizes)), default=0.0))
        for node in layer:
            ys[node] = y + heights[-1] / 2
        y += heights[-1] + _BETWEEN
    half = {n: heights[k] / 2 for k, layer in enumerate(net.layers) for n in layer}
    lines = []
    for (a, b), route in zip(edges, net.routes, strict=True):
        first, *passed, last = route
        points = [(xs[first], ys[first] + sizes[first][1] / 2)]
        for n in passed:  # vertical beside the nodes of a layer
            points += [(xs[n], ys[n] - half[n]), (xs[n], ys[n] + half[n])]
        points.append((xs[last], ys[last] - sizes[last][1] / 2))
        lines.append(tuple(points if rank[a] < rank[b] else points[::-1]))
    width = max(x + w / 2 for x, w in zip(xs, net.widths, strict=True))
    count = len(sizes)
    centers = tuple(zip(xs[:count], ys[:count], strict=True))
    return Layout(width, y - _BETWEEN, centers, tuple(lines))


def _topological(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    waiting = [0] * count
    takers: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        takers[a].append(b)
        waiting[b] += 1
    order: list[int] = []
    placed = [False] * count
    ready = [n for n in range(count - 1, -1, -1) if not waiting[n]]
    rest = iter(range(count))
    while len(order) < count:
        # In a circle no node is ready: take any.
        node = ready.pop() if ready else next(n for n in rest if not placed[n])
        if placed[node]:
            continue
        placed[node] = True
        order.append(node)
        for taker in reversed(takers[node]):
            waiting[taker] -= 1
            if not waiting[taker]:
                ready.append(taker)
    return order


def _layers(order: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """Layers by the longest path; then each node moves down, next to those that take from it."""
    layer = [0] * len(order)
    takers: list[list[int]] = [[] for _ in order]
    for a, b in edges:
        takers[a].append(b)
    for node in order:
        for taker in takers[node]:
            layer[taker] = max(layer[taker], layer[node] + 1)
    for node in reversed(order):
        if takers[node]:
            layer[node] = min(layer[taker] for taker in takers[node]) - 1
    return layer


def _net(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], layer_of: list[int]
) -> _Net:
    widths = [width + _APART for width, _ in sizes]
    layer = list(layer_of)
    links: dict[tuple[int, int], None] = {}
    lanes: dict[int, list[int]] = {}  # the points of each node in the layers below it
    routes = []
    for a, b in edges:
        lane = lanes.setdefault(a, [a])
        while layer[a] + len(lane) < layer[b]:
            widths.append(_LANE)
            layer.append(layer[a] + len(lane))
            links[lane[-1], len(widths) - 1] = None
            lane.append(len(widths) - 1)
        route = [*lane[: layer[b] - layer[a]], b]
        links[route[-2], b] = None
        routes.append(route)
    layers: list[list[int]] = [[] for _ in range(max(layer) + 1)]
    for node, number in enumerate(layer):
        layers[number].append(node)
    above: list[list[int]] = [[] for _ in widths]
    below: list[list[int]] = [[] for _ in widths]
    for a, b in links:
        below[a].append(b)
        above[b].append(a)
    return _Net(widths, layers, above, below, routes)


def _sort_layers(net: _Net, sweeps: int) -> None:
    """Sort each layer by the mean index of the neighbors, down and up, and keep the best order."""
    index = {node: n for layer in net.layers for n, node in enumerate(layer)}
    best = [list(layer) for layer in net.layers]
    fewest = _crossings(net, index)
    for sweep in range(sweeps):
        down = sweep % 2 == 0
        for layer in net.layers if down else reversed(net.layers):
            mean = {
                node: sum(index[n] for n in near) / len(near)
                for node in layer
                if (near := (net.above if down else net.below)[node])
            }
            layer.sort(key=lambda node, mean=mean: mean.get(node, index[node]))  # type: ignore[misc]
            index |= {node: n for n, node in enumerate(layer)}
        if (crossings := _crossings(net, index)) < fewest:
            best = [list(layer) for layer in net.layers]
            fewest = crossings
    net.layers[:] = best


def _crossings(net: _Net, index: dict[int, int]) -> int:
    crossings = 0
    for layer in net.layers:
        ends: list[int] = []
        for node in layer:
            for end in sorted(index[n] for n in net.below[node]):
                crossings += len(ends) - bisect_left(ends, end + 1)
                insort(ends, end)
    return crossings


def _across(net: _Net, sweeps: int) -> list[float]:
    xs = [0.0] * len(net.widths)
    for layer in net.layers:
        x = 0.0
        for node in layer:
            xs[node] = x + net.widths[node] / 2
            x += net.widths[node]
    # Nodes at an end of the graph, such as parameters, follow the others.
    pull = [
        1.0 if above and below else _END for above, below in zip(net.above, net.below, strict=True)
    ]
    for sweep in range(2 * sweeps):
        neighbors = (net.above, net.below) if sweep % 2 == 0 else (net.below, net.above)
        for layer in net.layers if sweep % 2 == 0 else reversed(net.layers):
            wanted, weights = [], []
            for node in layer:
                near = neighbors[0][node] or neighbors[1][node]
                weight = sum(pull[n] for n in near)
                wanted.append(sum(xs[n] * pull[n] for n in near) / weight if near else xs[node])
                weights.append(pull[node])
            for node, x in zip(layer, _spread(net, layer, wanted, weights), strict=True):
                xs[node] = x
    return xs


def _spread(net: _Net, layer: list[int], wanted: list[float], weights: list[float]) -> list[float]:
    """The positions nearest to the wanted ones, in this order and without overlaps."""
    offsets = []
    edge = 0.0
    for node in layer:
        offsets.append(edge + net.widths[node] / 2)
        edge += net.widths[node]
    blocks: list[tuple[float, float, int]] = []  # mean, weight, how many
    for want, offset, pull in zip(wanted, offsets, weights, strict=True):
        mean = want - offset
        weight = pull
        count = 1
        while blocks and blocks[-1][0] > mean:
            before, heavy, many = blocks.pop()
            mean = (mean * weight + before * heavy) / (weight + heavy)
            weight, count = weight + heavy, count + many
        blocks.append((mean, weight, count))
    starts = [mean for mean, _, count in blocks for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]
