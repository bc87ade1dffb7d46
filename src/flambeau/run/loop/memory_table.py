"""The memory of a run, module by module, as a small table for a message."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flambeau.recipes.memory.memory_budget import activations_by_module, top_modules
from flambeau.run.loop.run_parts import RunParts
from flambeau.run.loop.state import ResumableState

_MAX_ROWS = 12  # of modules; the rest is summed up in one
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_COLUMNS = ("parameters", "gradients", "optimizer", "activations")


def inputs_of(data: Any) -> Tensor | None:
    """The first tensor of a batch, on the meta device: most loops give it to their model."""
    first = next((leaf for leaf in tree_leaves(data) if isinstance(leaf, Tensor)), None)
    if first is None:
        return None
    # Byte images are converted before a model sees them.
    dtype = torch.float32 if first.dtype is torch.uint8 else first.dtype
    return torch.empty_like(first, dtype=dtype, device="meta")


def memory_table(state: ResumableState, parts: RunParts, inputs: Tensor | None) -> str:
    """Parameters, gradients, optimizer state and activations of a forward pass, in MiB, by module.

    Args:
        inputs: of the model, on the meta device; without them, or where the model fails on that device, the
            column of activations is left out.
    """
    kept: Mapping[str, int] = {}
    if inputs is not None and parts.shards is None:
        try:
            kept = activations_by_module(
                parts.model, (inputs,), autocast=_DTYPES.get(parts.amp.precision)
            )
        # Any model may fail on tensors without values, and a table must not end a run that can continue.
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError):
            kept = {}
    rows = {name: [0, 0, 0, kept.get(name, 0)] for name in ("", *top_modules(parts.model))}
    for name, parameter in state.model.named_parameters():  # a sharded model: this rank's pieces
        module = next((row for row in rows if row and f"{name}.".startswith(f"{row}.")), "")
        state_of = state.optimizer.state.get(parameter, {})
        for column, tensors in enumerate(([parameter], [parameter.grad], state_of.values())):
            rows[module][column] += _bytes(tensors)
    return _table(rows, has_activations=bool(kept))


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _table(rows: Mapping[str, list[int]], *, has_activations: bool) -> str:
    """Modules in their order, without empty ones; beyond the largest, the rest in one row."""
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    named = {name or "(model itself)": row for name, row in rows.items() if any(row)}
    largest = sorted(named, key=lambda name: -sum(named[name]))[:_MAX_ROWS]
    shown = {name: row for name, row in named.items() if name in largest}
    if rest := [row for name, row in named.items() if name not in largest]:
        shown[f"{len(rest)} others"] = [sum(column) for column in zip(*rest, strict=True)]
    shown["all"] = total
    columns = _COLUMNS if has_activations else _COLUMNS[:-1]
    width = max(map(len, ["MiB in memory", *shown]))
    lines = ["  ".join([f"{'MiB in memory':<{width}}", *(f"{name:>11}" for name in columns)])]
    for name, row in shown.items():
        sizes = (f"{size / 2**20:11.1f}" for size in row[: len(columns)])
        lines.append("  ".join([f"{name:<{width}}", *sizes]))
    return "\n".join(f"  {line}" for line in lines)
