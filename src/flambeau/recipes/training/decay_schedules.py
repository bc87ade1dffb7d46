"""Schedules that fall in other ways: polynomial, exponential, staircase, and warm-up-stable-decay.

以其他方式下降的学习率调度：多项式、指数、阶梯，以及“预热-稳定-衰减”（WSD）。

Source: polynomial after Chen et al., DeepLab, arXiv 1606.00915, section 4.1 (power 0.9); warm-up-stable-decay
after Hu et al., MiniCPM, arXiv 2404.06395, section 4, its '1-sqrt' after Hägele et al., arXiv 2405.18392,
section 3. Each is a pure function from the step to a multiplier of the base rate, with the warm-up of
Goyal et al., arXiv 1706.02677: step k of it gives (k + 1) / (warmup_steps + 1), never 0.

Not for a rate that follows a metric, which needs an object with a state. Exponential and staircase suit
recipes that were tuned with them (EfficientNet); for a new one a cosine or WSD asks for fewer choices.
"""

import math
from typing import Literal

Shape = Literal["linear", "1-sqrt", "cosine"]


def polynomial(
    step: int, *, total_steps: int, warmup_steps: int = 0, power: float = 2.0, end: float = 0.0
) -> float:
    """(1 - progress) ** power, from 1 after the warm-up to `end` at `total_steps`, where it stays.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        warmup_steps: in [0, total_steps].
        power: above 0; 1 is a straight line, 2 is usual with large batches, 0.9 in segmentation.
        end: the multiplier from `total_steps` on, at least 0.

    Returns:
        The factor for the base rate.

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
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        end: the multiplier from `total_steps` on, above 0, such as 0.01.
        warmup_steps: in [0, total_steps].

    Returns:
        The factor for the base rate.

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
    """Full rate after the warm-up, times `gamma` each `every` steps after it, until `total_steps`.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        every: width of a stair in steps, at least 1, counted from the end of the warm-up.
        gamma: height of a stair, above 0.
        warmup_steps: in [0, total_steps].

    Returns:
        The factor for the base rate; after the run that of its last step.

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
    shape: Shape = "1-sqrt",
) -> float:
    """Warm-up, full rate, and a decay to `end` in the last `decay_steps` of the run, where it stays.

    Until the decay the rate does not depend on `total_steps`: one long run can be continued, and branched
    off into decays at several lengths, which a cosine cannot.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        decay_steps: in [1, total_steps - warmup_steps]; 10 to 20 % of the run in the papers.
        warmup_steps: in [0, total_steps].
        end: the multiplier from `total_steps` on, at least 0.
        shape: of the decay; '1-sqrt' was the best of these in section 3 of arXiv 2405.18392.

    Returns:
        The factor for the base rate.

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
