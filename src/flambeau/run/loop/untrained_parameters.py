"""Parameters that a run does not train, found in its first step: forgotten ones look like frozen ones."""

from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import Optimizer

_NAMED = 3


def untrained_lines(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """A line for each kind, for the user.

    Args:
        model: after the backward pass of a step, before its gradients are cleared.
    """
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if left_out := [name for name, p in trainable if id(p) not in held]:
        yield (
            f"{_names(left_out, len(trainable))} not in the optimizer and stay as they are: give them to it, "
            "or say by requires_grad_(False) that this is meant"
        )
    if unreached := [name for name, p in trainable if id(p) in held and p.grad is None]:
        yield (
            f"{_names(unreached, len(trainable))} without a gradient in the first step: the loss does not "
            "depend on what they compute"
        )


def _names(found: Sequence[str], count: int) -> str:
    more = ", ..." if len(found) > _NAMED else ""
    verb = "is" if len(found) == 1 else "are"
    return (
        f"{len(found)} of {count} trainable parameters ({', '.join(found[:_NAMED])}{more}) {verb}"
    )
