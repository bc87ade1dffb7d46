"""L1, L2 and elastic penalties on chosen weights, and the step that makes L1 give exact zeros.

对选定的权重施加 L1、L2 与弹性惩罚，以及让 L1 得到精确零值的近端步骤。

Source: Zou and Hastie, "Regularization and variable selection via the elastic net", 2005 (the penalty);
Parikh and Boyd, "Proximal algorithms", 2014, section 6.5.2 (the soft threshold); Loshchilov and Hutter,
"Decoupled weight decay regularization", ICLR 2019 (arXiv:1711.05101), for what L2 is not.

Not for plain L2 on a model trained by SGD or AdamW: the optimizer's weight_decay costs less.
"""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter, is_lazy


def penalized_parameters(
    model: nn.Module, *, patterns: Collection[str] | None = None
) -> list[Parameter]:
    """The trainable parameters that a penalty should act on, each once.

    Args:
        model: any module with initialized parameters.
        patterns: as in a shell ('*.conv?.weight'), compared with whole parameter names, case included.
            None takes the matrices and kernels: no bias, no parameter of fewer than two dimensions, none of
            a LayerNorm or RMSNorm.

    Returns:
        In the order of the model. Tied weights are there once, frozen ones not at all: set
        `requires_grad` before.

    Raises:
        ValueError: a pattern without a match, nothing left, or a lazy parameter.
        TypeError: `patterns` is a single string.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        >>> [tuple(weight.shape) for weight in penalized_parameters(model)]
        [(8, 3, 3, 3)]
    """
    if isinstance(patterns, str):
        raise TypeError(f"patterns must be a list, got one string: [{patterns!r}]")
    names = dict(model.named_parameters(remove_duplicate=False))
    if patterns is None:
        norms = {
            parameter
            for module in model.modules()
            if isinstance(module, nn.LayerNorm | nn.RMSNorm)
            for parameter in module.parameters()
        }
        # 'bias' as a word of the last part: also in_proj_bias, relative_position_bias_table.
        biases = {p for name, p in names.items() if "bias" in name.rpartition(".")[2].split("_")}
        chosen = {p for p in names.values() if is_lazy(p) or p.ndim > 1} - norms - biases
    else:
        chosen = set()
        for pattern in patterns:
            matched = {p for name, p in names.items() if fnmatchcase(name, pattern)}
            if not matched:
                raise ValueError(
                    f"{pattern!r} matches none of the model's {len(names)} parameter names, "
                    f"such as {next(iter(names), None)!r}"
                )
            chosen |= matched
    if any(is_lazy(p) for p in chosen):
        raise ValueError("a parameter has no shape yet: run one batch through the model first")
    kept = [p for p in model.parameters() if p in chosen and p.requires_grad]
    if not kept:
        raise ValueError("no trainable parameter is left to penalize")
    return kept


def weight_penalty(parameters: Iterable[Tensor], *, l1: float = 0.0, l2: float = 0.0) -> Tensor:
    """l1 * sum |w| + l2/2 * sum w^2, to be added to the loss once an optimizer step.

    The half makes the gradient of the second term l2 * w, so that l2 means what `weight_decay` means to SGD.

    Args:
        parameters: floating tensors, as from `penalized_parameters`; one listed twice counts once, one that
            does not require grad not at all.
        l1: at least 0.
        l2: at least 0; one of the two is above 0.

    Returns:
        0-d, on the device of the first parameter; float64 if one of them is, else float32, also under
        autocast and for bfloat16 weights.

    Raises:
        ValueError: a negative coefficient, both 0, or no parameters (an exhausted generator).

    Example:
        >>> weight = torch.tensor([[3.0, -4.0]], requires_grad=True)
        >>> weight_penalty([weight], l1=0.1, l2=0.01)
        tensor(0.8250, grad_fn=<SumBackward0>)
    """
    if not (l1 >= 0 and l2 >= 0 and l1 + l2 > 0):
        raise ValueError(f"l1 and l2 must be at least 0, and one above 0, got {l1} and {l2}")
    listed = list(parameters)
    if not listed:
        raise ValueError("there are no parameters: a generator can be read once, pass a list")
    device = listed[0].device
    terms = []
    for weight in {id(p): p for p in listed if p.requires_grad}.values():
        # 8 or 11 bits are not enough for a sum of millions; nothing here is narrowed by autocast.
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        term = wide.new_zeros(())
        if l1:
            term = term + l1 * wide.abs().sum()
        if l2:
            term = term + (0.5 * l2) * wide.square().sum()
        terms.append(term.to(device))
    if not terms:
        return torch.zeros((), device=device)
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in terms) else torch.float32
    return torch.stack([term.to(dtype) for term in terms]).sum()


@torch.no_grad()
def soft_threshold(parameters: Iterable[Tensor], threshold: float | Tensor) -> None:
    """Move every weight towards 0 by `threshold`, in place, and to exactly 0 those that would pass it.

    After a step of gradient descent with learning rate lr on the loss alone, the threshold lr * l1 makes it a
    step of proximal gradient descent on the loss + l1 * sum |w|.

    Args:
        parameters: floating tensors; those that do not require grad stay as they are, one listed twice
            moves once.
        threshold: at least 0; a 0-d tensor on the device of the parameters is taken without looking.

    Raises:
        ValueError: a negative threshold, no parameters (an exhausted generator), or none that requires grad.

    Example:
        >>> weight = torch.tensor([0.5, -0.05, 0.02], requires_grad=True)
        >>> soft_threshold([weight], 0.1)
        >>> weight.detach()
        tensor([0.4000, 0.0000, 0.0000])
    """
    if not isinstance(threshold, Tensor) and not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")
    listed = list(parameters)
    if not listed:
        raise ValueError("there are no parameters: a generator can be read once, pass a list")
    if not any(p.requires_grad for p in listed):
        raise ValueError(
            f"none of the {len(listed)} tensors requires grad, so nothing would change: "
            "pass parameters that are trained"
        )
    limit: Any = threshold  # torch's annotations want both bounds of one kind
    for weight in {id(p): p for p in listed if p.requires_grad}.values():
        # w minus itself is an exact 0, and a NaN stays one.
        weight.sub_(weight.clamp(-limit, limit))
