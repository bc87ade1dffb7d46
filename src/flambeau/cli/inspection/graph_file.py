"""`flambeau inspect --graph`: modules and autograd's graph as a picture."""

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.table import print_json
from flambeau.sandbox.here import outside

if TYPE_CHECKING:
    from torch import nn


def write_graphs(
    path: Path,
    model: "nn.Module",
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    depth: int | None,
    as_json: bool,
) -> int:
    """Write the picture, and print what is in it; returns the exit code."""
    from flambeau.inspection.graphs.picture import model_graphs, size_text, svg_of_graphs
    from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

    with contextlib.redirect_stdout(sys.stderr):  # what the model itself prints
        graphs = model_graphs(model, args, kwargs, depth=depth)
    write_file(outside(path), svg_of_graphs(graphs).encode())
    if as_json:
        more = {"kept_bytes": graphs.kept_bytes, "file": str(path)}
        print_json([dataclasses.asdict(graphs) | more])
        return 0
    nodes = graphs.autograd.nodes
    leaves = sum(node.leaves for node in nodes)
    operations = sum(node.nodes for node in nodes) - leaves
    print(f"{path}: {len(graphs.modules.nodes):,} nodes of modules and data,")
    print(f"{operations:,} operations of autograd and {leaves:,} leaves in {len(nodes):,} nodes")
    print(f"{size_text(graphs.kept_bytes)} kept for a backward pass; the largest:")
    for node in sorted(nodes, key=lambda node: -node.kept_bytes)[:5]:
        if node.kept_bytes:
            where = f" in {node.module}" if node.module and node.module != node.name else ""
            print(f"  {size_text(node.kept_bytes):>10}  {node.name or '(model)'}{where}")
    for note in graphs.notes:
        print(note)
    return 0
