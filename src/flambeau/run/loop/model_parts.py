"""What a model consists of, in a few numbers that stand in the folder of a run."""

from typing import Any

from torch import nn

from flambeau.parallel.shard_layout import is_sharded

_MOST_PARTS = 40


def model_parts(model: nn.Module) -> dict[str, Any]:
    """Its class, its parameters and which of them are trained, and the same of its parts.

    Args:
        model: its parameters may be shared, in pieces, or without a shape yet.

    Returns:
        JSON: `class`, `parameters`, `trained`, and `parts`, at most 40 of [name, class, parameters, trained].
    """

    def count(module: nn.Module) -> tuple[int, int]:
        known = [p for p in module.parameters() if not isinstance(p, nn.UninitializedParameter)]
        return sum(p.numel() for p in known), sum(p.numel() for p in known if p.requires_grad)

    total, trained = count(model)
    parts = [[name, _class_name(part), *count(part)] for name, part in model.named_children()]
    return {
        "class": _class_name(model),
        "parameters": total,
        "trained": trained,
        "parts": parts[:_MOST_PARTS],
    }


def _class_name(module: nn.Module) -> str:
    """The user's class: of a sharded module FSDP has made one that derives from itself and from that."""
    return (type(module).__bases__[-1] if is_sharded(module) else type(module)).__name__
