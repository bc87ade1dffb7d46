"""Learning-rate schedules as pure functions: step in, multiplier out.

学习率调度：输入步数、输出倍率的纯函数。

Source: cosine after Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts; warm-up and
the linear scaling rule after Goyal et al., arXiv 1706.02677, sections 2.1 and 2.2.

With no object there is no state to save and no order to get wrong: write the multiplier of step k before
optimizer step k, counting from 0. Warm-up step k gives (k + 1) / (warmup_steps + 1): never 0, equal
increments, and the step after the warm-up is the first at full rate.

Not for rates that follow a metric: torch.optim.lr_scheduler.ReduceLROnPlateau does that.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch.optim import Optimizer


def constant(step: int, *, total_steps: int, warmup_steps: int = 0) -> float:
    """Full rate after the warm-up.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        warmup_steps: in [0, total_steps].

    Returns:
        The factor for the base rate, in (0, 1].

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> [constant(step, total_steps=5, warmup_steps=3) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    _progress(step, total_steps, warmup_steps)
    return _warmup(step, warmup_steps)


def linear(step: int, *, total_steps: int, warmup_steps: int = 0, end: float = 0.0) -> float:
    """A straight line from 1 after the warm-up to `end` at `total_steps`, where it stays.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        warmup_steps: in [0, total_steps].
        end: the multiplier from `total_steps` on, at least 0.

    Returns:
        The factor for the base rate. The last step of a run has not quite reached `end`.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> [linear(step, total_steps=4) for step in range(6)]
        [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    progress = _progress(step, total_steps, warmup_steps)
    return _warmup(step, warmup_steps) * _between(1.0 - progress, end)


def cosine(step: int, *, total_steps: int, warmup_steps: int = 0, end: float = 0.0) -> float:
    """Half a cosine wave from 1 after the warm-up to `end` at `total_steps`, where it stays.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        warmup_steps: in [0, total_steps].
        end: the multiplier from `total_steps` on, at least 0.

    Returns:
        The factor for the base rate. The last step of a run has not quite reached `end`.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> [round(cosine(step, total_steps=5, warmup_steps=1), 3) for step in range(6)]
        [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    progress = _progress(step, total_steps, warmup_steps)
    return _warmup(step, warmup_steps) * _between((1.0 + math.cos(math.pi * progress)) / 2.0, end)


def multistep(
    step: int,
    *,
    total_steps: int,
    milestones: Sequence[int],
    warmup_steps: int = 0,
    gamma: float = 0.1,
) -> float:
    """Full rate after the warm-up, times `gamma` at each milestone.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        milestones: steps of the run (not epochs, not fractions), rising, in [warmup_steps, total_steps).
        warmup_steps: in [0, total_steps].
        gamma: above 0.

    Returns:
        The factor for the base rate.

    Raises:
        ValueError: a number outside its range, or a milestone that would not take effect.

    Example:
        >>> [round(multistep(step, total_steps=4, milestones=[1, 3]), 4) for step in range(4)]
        [1.0, 0.1, 0.1, 0.01]
    """
    _progress(step, total_steps, warmup_steps)
    if not gamma > 0:
        raise ValueError(f"gamma must be above 0, got {gamma}")
    bounds = [warmup_steps - 1, *milestones, total_steps]
    if any(low >= high or type(low) is not int for low, high in pairwise(bounds)):
        raise ValueError(
            f"milestones must be rising whole steps in [{warmup_steps}, {total_steps}), "
            f"got {list(milestones)}"
        )
    return _warmup(step, warmup_steps) * gamma ** bisect_right(milestones, step)


def linear_scaled_lr(base_lr: float, batch_size: int, *, reference_batch_size: int = 256) -> float:
    """The linear scaling rule: k times the batch, k times the rate. Use it with a warm-up.

    Args:
        base_lr: a rate known to be good at `reference_batch_size`, above 0.
        batch_size: samples an optimizer step, over all processes and accumulated micro-batches.
        reference_batch_size: 256 in the paper; it held there up to about 8192 samples.

    Returns:
        base_lr * batch_size / reference_batch_size.

    Raises:
        ValueError: a number that is not above 0.

    Example:
        >>> linear_scaled_lr(0.1, 1024)
        0.4
    """
    if not (base_lr > 0 and batch_size > 0 and reference_batch_size > 0):
        raise ValueError(
            "base_lr, batch_size and reference_batch_size must be above 0, "
            f"got {base_lr}, {batch_size}, {reference_batch_size}"
        )
    return base_lr * batch_size / reference_batch_size


def set_lr(optimizer: Optimizer, multiplier: float) -> None:
    """Write `initial_lr * multiplier` into every group of an optimizer; call it before the step.

    The first call keeps each group's `lr` as its `initial_lr`, the key that torch's own schedulers use.
    It goes into the optimizer's state dict, so a loaded optimizer continues from the rates of its run.

    Args:
        optimizer: with rates that are floats or 0-d tensors (those are written in place, on their device).
        multiplier: from a schedule.

    Example:
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
        >>> set_lr(optimizer, cosine(50, total_steps=100))
        >>> optimizer.param_groups[0]["lr"]
        0.1
    """
    for group in optimizer.param_groups:
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr.copy_(group.setdefault("initial_lr", lr.clone()) * multiplier)
        else:
            group["lr"] = group.setdefault("initial_lr", lr) * multiplier


def _progress(step: int, total_steps: int, warmup_steps: int) -> float:
    """The share of the way from the end of the warm-up to the end of the run, in [0, 1]."""
    if step < 0 or total_steps < 1 or not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            "a schedule needs step >= 0, total_steps >= 1 and 0 <= warmup_steps <= total_steps, "
            f"got {step}, {total_steps} and {warmup_steps}"
        )
    if step <= warmup_steps:  # perhaps all of the run
        return float(step >= total_steps)
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _between(share: float, end: float) -> float:
    if not end >= 0:
        raise ValueError(f"end must be at least 0, got {end}")
    return end + (1.0 - end) * share
