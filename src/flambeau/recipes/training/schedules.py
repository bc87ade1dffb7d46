"""Learning-rate schedules as pure functions: step in, multiplier out.

学习率调度：输入步数、输出倍率的纯函数。

Source: cosine after Loshchilov and Hutter, "SGDR", ICLR 2017, equation 5, without restarts; warm-up and
the linear scaling rule after Goyal et al., arXiv 1706.02677, sections 2.1 and 2.2; polynomial after Chen et
al., DeepLab, arXiv 1606.00915, section 4.1 (power 0.9); warm-up-stable-decay after Hu et al., MiniCPM, arXiv
2404.06395, section 4, its '1-sqrt' after Hägele et al., arXiv 2405.18392, section 3.

Pure functions have no state to save and no call order to get wrong: set the multiplier of step k before
optimizer step k, counting from 0. Warm-up step k gives (k + 1) / (warmup_steps + 1): never 0, equal
increments, and full rate at the first step after the warm-up. `chain` joins schedules.

Not for rates that follow a metric: see torch.optim.lr_scheduler.ReduceLROnPlateau. Exponential and
staircase suit recipes that were tuned with them (EfficientNet); for a new one, cosine and WSD have fewer
settings to choose.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch.optim import Optimizer

Schedule = Callable[[int], float]


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
        step, total_steps, warmup_steps: as for `constant`.
        end: the multiplier from `total_steps` on, at least 0.

    Returns:
        The factor for the base rate; the last step of a run has not quite reached `end`.

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
        step, total_steps, warmup_steps: as for `constant`.
        end: the multiplier from `total_steps` on, at least 0.

    Returns:
        As for `linear`.

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
        step, total_steps, warmup_steps: as for `constant`.
        milestones: steps of the run (not epochs, not fractions), rising, in [warmup_steps, total_steps).
        gamma: above 0.

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


def polynomial(
    step: int, *, total_steps: int, warmup_steps: int = 0, power: float = 2.0, end: float = 0.0
) -> float:
    """(1 - progress) ** power, from 1 after the warm-up to `end` at `total_steps`, where it stays.

    Args:
        step, total_steps, warmup_steps: as for `constant`.
        power: above 0; 1 is a straight line, 2 is usual with large batches, 0.9 in segmentation.
        end: the multiplier from `total_steps` on, at least 0.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> [polynomial(step, total_steps=4) for step in range(6)]
        [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """
    progress = _progress(step, total_steps, warmup_steps)
    if not power > 0:
        raise ValueError(f"power must be above 0, got {power}")
    return _warmup(step, warmup_steps) * _between((1.0 - progress) ** power, end)


def exponential(step: int, *, total_steps: int, end: float, warmup_steps: int = 0) -> float:
    """The same factor at each step, from 1 after the warm-up to `end` at `total_steps`, where it stays.

    Args:
        step, total_steps, warmup_steps: as for `constant`.
        end: the multiplier from `total_steps` on, above 0, such as 0.01.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> [round(exponential(step, total_steps=4, end=0.0625), 4) for step in range(6)]
        [1.0, 0.5, 0.25, 0.125, 0.0625, 0.0625]
    """
    progress = _progress(step, total_steps, warmup_steps)
    if not end > 0:
        raise ValueError(f"end must be above 0 (no factor leads to 0), got {end}")
    return _warmup(step, warmup_steps) * float(end**progress)


def staircase(
    step: int, *, total_steps: int, every: int, gamma: float = 0.1, warmup_steps: int = 0
) -> float:
    """Full rate after the warm-up, times `gamma` every `every` steps until `total_steps`.

    Args:
        step, total_steps, warmup_steps: as for `constant`.
        every: width of a stair in steps, at least 1, counted from the end of the warm-up.
        gamma: height of a stair, above 0.

    Returns:
        The factor for the base rate; after the run, that of the last step.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> [staircase(step, total_steps=7, every=2, gamma=0.5, warmup_steps=1) for step in range(8)]
        [0.5, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25]
    """
    _progress(step, total_steps, warmup_steps)
    if not (every >= 1 and gamma > 0):
        raise ValueError(f"every must be at least 1 and gamma above 0, got {every} and {gamma}")
    stair = max(0, min(step, total_steps - 1) - warmup_steps) // every
    return _warmup(step, warmup_steps) * float(gamma**stair)


def wsd(
    step: int,
    *,
    total_steps: int,
    decay_steps: int,
    warmup_steps: int = 0,
    end: float = 0.0,
    shape: Literal["linear", "1-sqrt", "cosine"] = "1-sqrt",
) -> float:
    """Warm-up, full rate, and a decay to `end` in the last `decay_steps` of the run, where it stays.

    Until the decay the rate does not depend on `total_steps`, so a run can be extended, and decays can branch
    off at several lengths.

    Args:
        step, total_steps, warmup_steps: as for `constant`.
        decay_steps: in [1, total_steps - warmup_steps]; 10 to 20 % of the run in the papers.
        end: the multiplier from `total_steps` on, at least 0.
        shape: of the decay; '1-sqrt' was the best of these in section 3 of arXiv 2405.18392.

    Raises:
        ValueError: a number outside its range, or an unknown shape.

    Example:
        >>> [wsd(step, total_steps=8, decay_steps=4, shape="linear") for step in range(9)]
        [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    _progress(step, total_steps, warmup_steps)
    if not 1 <= decay_steps <= total_steps - warmup_steps:
        raise ValueError(
            f"decay_steps must be from 1 to {total_steps - warmup_steps}, what the warm-up leaves; "
            f"got {decay_steps}"
        )
    progress = min(1.0, max(0, step - (total_steps - decay_steps)) / decay_steps)
    if shape == "linear":
        share = 1.0 - progress
    elif shape == "1-sqrt":
        share = 1.0 - math.sqrt(progress)
    elif shape == "cosine":
        share = (1.0 + math.cos(math.pi * progress)) / 2.0
    else:
        raise ValueError(f"shape must be 'linear', '1-sqrt' or 'cosine', got {shape!r}")
    return _warmup(step, warmup_steps) * _between(share, end)


def chain(pieces: Sequence[tuple[int, Schedule]], last: Schedule) -> Schedule:
    """Join schedules: each runs for its number of steps, then the next one begins at its step 0.

    Args:
        pieces: (steps, schedule), each at least one step; a schedule counts from the start of its piece.
        last: for all further steps.

    Returns:
        A function from the step of the run to the multiplier.

    Raises:
        ValueError: a piece has no steps; from the returned function: a step below 0.

    Example:
        >>> rate = chain([(2, lambda step: 1.0), (3, lambda step: 0.5 - 0.1 * step)], lambda step: 0.1)
        >>> [round(rate(step), 1) for step in range(7)]
        [1.0, 1.0, 0.5, 0.4, 0.3, 0.1, 0.1]
    """
    for steps, _ in pieces:
        if steps < 1:
            raise ValueError(f"each piece needs at least one step, got {[n for n, _ in pieces]}")
    starts = [0, *accumulate(steps for steps, _ in pieces)]
    schedules = [*(schedule for _, schedule in pieces), last]

    def multiplier(step: int) -> float:
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        piece = bisect_right(starts, step) - 1
        return schedules[piece](step - starts[piece])

    return multiplier


def with_warmup(schedule: Schedule, *, warmup_steps: int) -> Schedule:
    """A linear warm-up to the first value of any schedule, then the schedule from its step 0.

    Args:
        schedule: from the step after the warm-up to the multiplier.
        warmup_steps: at least 0.

    Returns:
        A function from the step of the run to the multiplier, above 0 in the warm-up unless the schedule
        begins with 0.

    Raises:
        ValueError: a negative number of steps.

    Example:
        >>> rate = with_warmup(lambda step: 0.5**step, warmup_steps=3)
        >>> [rate(step) for step in range(6)]
        [0.25, 0.5, 0.75, 1.0, 0.5, 0.25]
    """
    if warmup_steps < 0:
        raise ValueError(f"warmup_steps must be at least 0, got {warmup_steps}")
    if warmup_steps == 0:
        return chain([], schedule)
    first = schedule(0)
    return chain([(warmup_steps, lambda step: first * (step + 1) / (warmup_steps + 1))], schedule)


def piecewise_linear(step: int, *, points: Sequence[tuple[int, float]]) -> float:
    """Straight lines from point to point, constant before the first and after the last.

    Args:
        points: (step, multiplier), at least one, steps rising and multipliers at least 0.

    Raises:
        ValueError: no points, steps that do not rise, or a negative number.

    Example:
        >>> [piecewise_linear(s, points=[(0, 0.5), (2, 1.0), (6, 0.0)]) for s in (0, 1, 2, 4, 6, 9)]
        [0.5, 0.75, 1.0, 0.5, 0.0, 0.0]
    """
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    steps = [position for position, _ in points]
    if not steps or any(b <= a for a, b in pairwise(steps)) or not all(v >= 0 for _, v in points):
        raise ValueError(
            f"points must be (step, multiplier) with rising steps and none negative, got {list(points)}"
        )
    after = bisect_right(steps, step)
    if after == 0:
        return float(points[0][1])
    if after == len(points):
        return float(points[-1][1])
    (left, low), (right, high) = points[after - 1], points[after]
    return low + (high - low) * (step - left) / (right - left)


def linear_scaled_lr(base_lr: float, batch_size: int, *, reference_batch_size: int = 256) -> float:
    """The linear scaling rule: k times the batch, k times the rate; use it with a warm-up.

    Args:
        base_lr: a rate known to be good at `reference_batch_size`, above 0.
        batch_size: samples per optimizer step, over all processes and accumulated micro-batches.
        reference_batch_size: 256 in the paper; it held there up to about 8192 samples.

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

    The first call keeps each group's `lr` as its `initial_lr`, as torch's schedulers do; it is part of the
    optimizer's state dict.

    Args:
        optimizer: its rates are floats or 0-d tensors (written in place, on their device).
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
    """The fraction of the steps after the warm-up that is done, in [0, 1]."""
    if step < 0 or total_steps < 1 or not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            "a schedule needs step >= 0, total_steps >= 1 and 0 <= warmup_steps <= total_steps, "
            f"got {step}, {total_steps} and {warmup_steps}"
        )
    if step <= warmup_steps:  # the warm-up may be the whole run
        return float(step >= total_steps)
    return min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / (warmup_steps + 1))


def _between(share: float, end: float) -> float:
    if not 0 <= end < math.inf:
        raise ValueError(f"end must be at least 0 and finite, got {end}")
    return end + (1.0 - end) * share
