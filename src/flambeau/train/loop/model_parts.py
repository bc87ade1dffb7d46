"""What a model consists of, in a few numbers that stand in the folder of a run."""

from typing import Any

from torch import nn

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
    parts = [[name, type(part).__name__, *count(part)] for name, part in model.named_children()]
    return {
        "class": type(model).__name__, "parameters": total, "trained": trained,
        "parts": parts[:_MOST_PARTS],
    }  # fmt: skip
