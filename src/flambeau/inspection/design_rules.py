"""Where a model does what the four rules of ShuffleNet V2 advise against, and how much of it that is.

Source: Ma et al., "ShuffleNet V2", ECCV 2018, arXiv 1807.11164, section 3.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from flambeau.inspection.graphs.picture import model_graphs
from flambeau.inspection.model_summary import ModuleSummary, summarize

# Times as many channels on one side as on the other; the paper has 1:1, 1:2, 1:6, 1:12.
_UNEQUAL = 2
_EXAMPLES = 3


@dataclass(frozen=True)
class Finding:
    """One of the rules.

    Attributes:
        rule: which.
        what: is counted.
        count: how many there are.
        share: of what the model does, from 0 to 1; None where that cannot be told.
        of: of which: FLOPs, or bytes that are read and written.
        examples: the largest, by name.
    """

    rule: str
    what: str
    count: int
    share: float | None
    of: Literal["FLOPs", "bytes"]
    examples: tuple[str, ...]


def rule_findings(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> tuple[Finding, ...]:
    """Count in a forward pass.

    Args:
        model: on any device, 'meta' too; not changed.
        args: of the model, tensors in any nesting; only shapes and dtypes count.
        kwargs: likewise.

    Raises:
        InputError: the model does not take them.
    """
    rows = summarize(model, args, kwargs).modules
    modules = dict(model.named_modules())
    layers = [
        (row, layer)
        for row in rows
        if row.calls and row.same_as is None
        for layer in [modules.get(row.name)]
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    ]
    points = [(row, c) for row, c in layers if c.groups == 1 and set(c.kernel_size) == {1}]
    unequal = [
        (row, f"{row.name} {c.in_channels} to {c.out_channels}")
        for row, c in points
        if max(c.in_channels, c.out_channels) >= _UNEQUAL * min(c.in_channels, c.out_channels)
    ]
    depthwise = [(row, row.name) for row, c in layers if 1 < c.groups == c.in_channels]
    grouped = [
        (row, f"{row.name} {c.groups} groups") for row, c in layers if 1 < c.groups < c.in_channels
    ]
    whole = rows[0]
    return (
        _of_flops(
            "channels in and out", f"1x1 convolutions of 1:{_UNEQUAL} or more", unequal, whole
        ),
        _of_flops("groups", "grouped convolutions", grouped, whole),
        _of_flops("groups", "depthwise convolutions", depthwise, whole),
        _joins(model, args, kwargs),
        _element_wise(rows),
    )


def _of_flops(
    rule: str, what: str, found: Iterable[tuple[ModuleSummary, str]], whole: ModuleSummary
) -> Finding:
    ordered = sorted(found, key=lambda pair: -pair[0].flops)
    share = sum(row.flops for row, _ in ordered) / whole.flops if whole.flops else None
    names = tuple(name for _, name in ordered[:_EXAMPLES])
    return Finding(rule, what, len(ordered), share, "FLOPs", names)


def _joins(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Finding:
    """Where branches meet: nodes with data from several others."""
    graph = model_graphs(model, args, kwargs, depth=99).modules
    sources: dict[int, int] = {}
    for _, place in graph.edges:
        sources[place] = sources.get(place, 0) + 1
    joins = sorted((p for p in sources if sources[p] > 1), key=lambda p: -sources[p])
    nodes = [(graph.nodes[place], sources[place]) for place in joins[:_EXAMPLES]]
    names = tuple(
        f"{node.name} of {count}" + (f" in {node.within}" if node.within else "")
        for node, count in nodes
    )
    return Finding("branches", "places where branches meet", len(joins), None, "FLOPs", names)


def _element_wise(rows: Sequence[ModuleSummary]) -> Finding:
    """Modules without products: normalization, activation, pooling; and what is between modules."""
    inside = {row.name.rpartition(".")[0] for row in rows if row.name}
    leaves = [row for row in rows if row.name not in inside and row.calls and row.same_as is None]
    without = [row for row in leaves if not row.flops]
    with_products = sum(row.accessed_bytes for row in leaves if row.flops)
    whole = rows[0].accessed_bytes
    without.sort(key=lambda row: -row.accessed_bytes)
    share = 1 - with_products / whole if whole else None
    names = tuple(row.name for row in without[:_EXAMPLES])
    what = "modules without matrix products"
    return Finding("element-wise operations", what, len(without), share, "bytes", names)
