"""Cross-entropy with label smoothing in both definitions, for class indices and for soft targets.

带标签平滑的交叉熵：两种定义都支持，目标可以是类别编号，也可以是概率。

Source: Szegedy et al., "Rethinking the Inception architecture for computer vision", CVPR 2016,
section 7 (arXiv:1512.00567).

Not for the teacher of a distillation, which smoothing makes worse (Müller et al. 2019), nor for classes that
are not exclusive (use binary cross-entropy), nor for a reported loss: evaluate with smoothing=0.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Definition = Literal["uniform", "others"]
Reduction = Literal["mean", "sum", "none"]

# A class that never occurs: by default torch silently ignores targets of -100; here they are errors.
_NO_INDEX = -(2**63)


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    smoothing: float = 0.0,
    definition: Definition = "uniform",
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
) -> Tensor:
    """The cross-entropy of softmax(logits) against smoothed targets.

    Args:
        logits: (N, C) floating-point, before softmax.
        targets: (N,) int64 classes in [0, C), or (N, C) probabilities (mixup, cutmix).
        smoothing: s in [0, 1), the probability to spread over the classes.
        definition: 'uniform' gives the right class 1 - s + s/C and others s/C, as the paper and torch's
            `label_smoothing`; 'others' 1 - s and s/(C - 1), for C of at least 2 and s of at most (C - 1)/C.
        weight: (C,) floating-point class weights, as torch's.
        reduction: 'mean' over N, 'sum', or 'none'. With class indices and weights, torch's 'mean' divides by
            the batch's sum of weights instead, which is not the mean over its parts.

    Returns:
        0-d, or (N,) for 'none'; float64 for float64 logits, else float32.

    Raises:
        TypeError: logits not floating-point, or targets neither int64 nor floating-point.
        ValueError: shapes that do not fit, smoothing out of range, an unknown definition or reduction.
        IndexError, RuntimeError: torch's, for a class outside [0, C) or weights not (C,); on CUDA its device
            assertion.

    Example:
        >>> logits, targets = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0])
        >>> cross_entropy(logits, targets, smoothing=0.1)
        tensor(0.3729)
        >>> cross_entropy(logits, torch.tensor([[0.9, 0.05, 0.05]]))
        tensor(0.4395)
        >>> cross_entropy(logits, targets, smoothing=0.1, definition="others")
        tensor(0.4395)
    """
    if logits.ndim != 2:
        raise ValueError(f"logits must be (N, C), got {tuple(logits.shape)}")
    if not logits.dtype.is_floating_point:
        raise TypeError(f"logits must be floating, got {logits.dtype}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be in [0, 1), got {smoothing}")
    if definition not in ("uniform", "others"):
        raise ValueError(f"definition must be 'uniform' or 'others', got {definition!r}")
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # 8 or 11 bits are not enough for a sum over C and N
    targets = _checked(targets, logits)
    if smoothing:
        targets = _smoothed(targets, logits, smoothing, definition)
    if weight is None:
        return F.cross_entropy(logits, targets, reduction=reduction, ignore_index=_NO_INDEX)
    losses = F.cross_entropy(
        logits, targets, weight=weight.to(logits.dtype), reduction="none", ignore_index=_NO_INDEX
    )
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


def _smoothed(targets: Tensor, logits: Tensor, smoothing: float, definition: str) -> Tensor:
    num_classes = logits.shape[1]
    if definition == "uniform":
        off = smoothing / num_classes
        on = 1 - smoothing + off
    elif num_classes > 1 and smoothing <= (num_classes - 1) / num_classes:
        off = smoothing / (num_classes - 1)
        on = 1 - smoothing
    else:
        raise ValueError(
            "definition 'others' needs at least 2 classes, and smoothing at most (C - 1)/C, or a "
            f"wrong class would weigh more than the right one; got {smoothing} and C={num_classes}"
        )
    if targets.dtype == torch.int64:
        # Not torch's `label_smoothing`, which is slower on class indices: its graph has a branch for the
        # right class and another for all classes.
        return torch.full_like(logits, off, requires_grad=False).scatter_(
            1, targets.unsqueeze(1), on
        )
    return targets * (on - off) + off


def _checked(targets: Tensor, logits: Tensor) -> Tensor:
    if targets.dtype == torch.int64:
        if targets.shape != logits.shape[:1]:
            raise ValueError(
                f"class targets for logits of shape {tuple(logits.shape)} must be "
                f"({logits.shape[0]},), got {tuple(targets.shape)}"
            )
        return targets
    if not targets.dtype.is_floating_point:
        raise TypeError(
            f"targets must be int64 classes or floating probabilities, got {targets.dtype}; "
            "convert classes with .long()"
        )
    if targets.shape != logits.shape:
        raise ValueError(
            f"targets of probabilities must have the shape of the logits, {tuple(logits.shape)}, "
            f"got {tuple(targets.shape)}"
        )
    return targets.to(logits.dtype)
