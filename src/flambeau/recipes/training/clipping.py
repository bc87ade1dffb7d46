"""Clip the norm of all gradients together, in a few calls and without waiting for the device.

裁剪全部梯度的总范数：只需几次调用，且不等待设备。

Source: Pascanu et al., "On the difficulty of training recurrent neural networks", ICML 2013,
algorithm 1 (arXiv:1211.5063); the factor max_norm / (norm + 1e-6), at most 1, is that of
torch.nn.utils.clip_grad_norm_.

Call it after backward (and after unscaling, in fp16) and before the optimizer's step.
Not for a limit on each element (torch.nn.utils.clip_grad_value_).
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import Parameter

_Groups = dict[tuple[torch.device, torch.dtype], list[Tensor]]


def clip_grad_norm(
    parameters_or_grads: Tensor | Iterable[Tensor | None],
    max_norm: float,
    *,
    norm_type: float = 2.0,
) -> Tensor:
    """Scale gradients in place so that their norm together is at most `max_norm`.

    A norm that is not finite does what torch does: an infinite one makes infinite gradients NaN
    and all others 0, a NaN makes all NaN.
    The result says so; ask it late, or mask the step on the device.

    Args:
        parameters_or_grads: parameters, whose `.grad` is meant, or gradients.
            A tensor that requires grad and an nn.Parameter stand for their `.grad`, every other
            tensor for itself; None, and a parameter without gradient, count as nothing.
            Types and devices may differ; a mix of CPU and accelerator waits, to copy the norm.
        max_norm: above 0; inf changes no finite gradient.
        norm_type: p of the p-norm, above 0; inf is the largest absolute value.

    Returns:
        The norm before clipping: 0-d, on the device of the first gradient, float64 if one of them
        is, else float32. A 0 on the CPU where there is no gradient.

    Raises:
        ValueError: max_norm or norm_type out of range, an exhausted generator, a gradient that is
            part of a graph (made by create_graph=True; pass its .detach()).

    Example:
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> clip_grad_norm(layer.parameters(), 1.0), layer.weight.grad
        (tensor(5.), tensor([[0.6000, 0.8000]]))
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (use grad_norm to not clip), got {max_norm}")
    groups = _groups(parameters_or_grads)
    with torch.no_grad():  # .grad may be part of a graph, the norm must not be
        norm = _norm(groups, norm_type)
        # torch's operations in torch's order, so that the last bit is the same.
        factor = norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0)
        for (device, dtype), grads in groups.items():
            # In the type of the gradients, else the fused kernel of CUDA is not taken.
            torch._foreach_mul_(grads, factor.to(device, dtype))
    return norm


def grad_norm(
    parameters_or_grads: Tensor | Iterable[Tensor | None], *, norm_type: float = 2.0
) -> Tensor:
    """The norm of all gradients together, as if they were one vector.

    Args:
        parameters_or_grads: as for `clip_grad_norm`.
        norm_type: p of the p-norm, above 0; inf is the largest absolute value.

    Returns:
        As `clip_grad_norm`.

    Raises:
        ValueError: as `clip_grad_norm`.

    Example:
        >>> grad_norm([torch.tensor([3.0, 0.0]), None, torch.tensor(4.0, dtype=torch.float64)])
        tensor(5., dtype=torch.float64)
    """
    with torch.no_grad():
        return _norm(_groups(parameters_or_grads), norm_type)


def _groups(source: Tensor | Iterable[Tensor | None]) -> _Groups:
    """The gradients by device and type: a foreach kernel takes one of each."""
    tensors = [source] if isinstance(source, Tensor) else list(source)
    if not tensors and isinstance(source, Iterator):
        raise ValueError(
            "there are no parameters: a generator such as model.parameters() can be read once; "
            "pass a fresh one, or a list"
        )
    groups: _Groups = {}
    for tensor in tensors:
        if tensor is None:
            continue
        grad: Tensor | None = tensor
        if tensor.requires_grad or isinstance(tensor, Parameter):
            if not tensor.is_leaf:
                raise ValueError(
                    f"a gradient of shape {tuple(tensor.shape)} is part of a graph "
                    "(create_graph=True); pass its .detach(), which shares the memory"
                )
            grad = tensor.grad
        if grad is not None:
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return groups


def _norm(groups: _Groups, norm_type: float) -> Tensor:
    if not norm_type > 0:
        raise ValueError(f"norm_type must be above 0, got {norm_type}")
    norms: list[Tensor] = []
    for (_, dtype), grads in groups.items():
        if dtype in (torch.bfloat16, torch.float16):
            # float16 overflows at 65504, and bfloat16 has 8 bits for a sum of millions.
            norms += torch._foreach_norm(grads, norm_type, torch.float32)
        else:
            norms += torch._foreach_norm(grads, norm_type)
    if not norms:
        return torch.zeros(())
    if len(groups) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total
