"""Schedules that rise and fall: cosine with restarts, and the 1cycle policy with its momentum.

有升有降的学习率调度：带重启的余弦，以及 1cycle 策略及其动量。

Source: Loshchilov and Hutter, "SGDR", arXiv 1608.03983, equation 5 and section 3 (cycles that grow);
Smith and Topin, "Super-convergence", arXiv 1708.07120, in the form of torch's OneCycleLR, number for number.
Each is a pure function from the step to a multiplier of the peak rate.

Not for runs of unknown length: both end with the run. Restarts are useful if you keep the weights of each
cycle's end (snapshot ensembles); for one set of weights a single cosine is the safer choice.
"""

import math
from typing import Literal


def cosine_restarts(
    step: int,
    *,
    total_steps: int,
    cycles: int,
    cycle_multiplier: float = 1.0,
    warmup_steps: int = 0,
    end: float = 0.0,
) -> float:
    """Half a cosine wave from 1 to `end`, `cycles` times; the last one ends with the run.

    The first cycle has (total_steps - warmup_steps) / (1 + m + m**2 + ...) steps, m being the multiplier;
    borders are rounded to whole steps. From `total_steps` on the value stays at `end`.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 1.
        cycles: at least 1.
        cycle_multiplier: the length of a cycle over that of the one before, at least 1; 2 in the paper.
        warmup_steps: in [0, total_steps]; only before the first cycle.
        end: the multiplier that each cycle falls to, at least 0.

    Raises:
        ValueError: a number outside its range, or a cycle shorter than one step.

    Example:
        >>> values = [cosine_restarts(step, total_steps=6, cycles=2, cycle_multiplier=2) for step in range(7)]
        >>> [round(value, 3) for value in values]
        [1.0, 0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < 0 or total_steps < 1 or not 0 <= warmup_steps <= total_steps:
        raise ValueError(
            "a schedule needs step >= 0, total_steps >= 1 and 0 <= warmup_steps <= total_steps, "
            f"got {step}, {total_steps} and {warmup_steps}"
        )
    if not (cycles >= 1 and cycle_multiplier >= 1 and 0 <= end < math.inf):
        raise ValueError(
            "cycles and cycle_multiplier must be at least 1 and end at least 0 and finite, "
            f"got {cycles}, {cycle_multiplier} and {end}"
        )
    shares = [cycle_multiplier**k for k in range(cycles)]
    length = total_steps - warmup_steps
    if length / sum(shares) < 1 and cycles > 1:
        raise ValueError(
            f"{length} steps after the warm-up are too few for {cycles} cycles: the first one would be "
            f"{length / sum(shares):.2g} steps long; use fewer cycles"
        )
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if step >= total_steps:
        return float(end)
    borders = [warmup_steps + round(length * sum(shares[:k]) / sum(shares)) for k in range(cycles)]
    borders.append(total_steps)
    cycle = sum(border <= step for border in borders) - 1
    progress = (step - borders[cycle]) / (borders[cycle + 1] - borders[cycle])
    return end + (1.0 - end) * (1.0 + math.cos(math.pi * progress)) / 2.0


def one_cycle(
    step: int,
    *,
    total_steps: int,
    rise: float = 0.3,
    start: float = 1 / 25,
    end: float = 1 / 250_000,
    shape: Literal["cosine", "linear"] = "cosine",
    three_phases: bool = False,
) -> float:
    """Rise from `start` to 1, then fall to `end` at the last step of the run.

    Args:
        step: optimizer steps already made, from 0.
        total_steps: length of the run, at least 2.
        rise: fraction of the run; the peak is at step rise * total_steps - 1, which may be between two steps.
        start: the first multiplier, in (0, 1]: torch's 1 / div_factor.
        end: the last multiplier, at least 0: torch's 1 / (div_factor * final_div_factor).
        shape: of rise and fall.
        three_phases: first fall back to `start` as fast as it rose, then to `end`.

    Returns:
        The factor for the peak rate; after the run, that of the last step.

    Raises:
        ValueError: a number outside its range, or a rise or fall of less than one step.

    Example:
        >>> [round(one_cycle(step, total_steps=5, rise=0.6, shape="linear"), 2) for step in range(6)]
        [0.04, 0.52, 1.0, 0.5, 0.0, 0.0]
    """
    if not (0 < start <= 1 and 0 <= end < math.inf):
        raise ValueError(
            f"start must be in (0, 1], end at least 0 and finite, got {start} and {end}"
        )
    turns = _turns(total_steps, rise, three_phases=three_phases)
    return _path(step, turns, [start, 1.0, *([start] if three_phases else []), end], shape)


def one_cycle_momentum(
    step: int,
    *,
    total_steps: int,
    rise: float = 0.3,
    low: float = 0.85,
    high: float = 0.95,
    shape: Literal["cosine", "linear"] = "cosine",
    three_phases: bool = False,
) -> float:
    """The momentum for `one_cycle`: lowest when the rate is highest.

    Args:
        step, total_steps, rise, shape, three_phases: as for `one_cycle`.
        low, high: in [0, 1).

    Returns:
        The momentum itself, for `group["momentum"]` of SGD or the first of `group["betas"]` of Adam.

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> values = [one_cycle_momentum(s, total_steps=5, rise=0.6, shape="linear") for s in range(5)]
        >>> [round(value, 2) for value in values]
        [0.95, 0.9, 0.85, 0.9, 0.95]
    """
    if not (0 <= low <= high < 1):
        raise ValueError(f"momenta must be 0 <= low <= high < 1, got {low} and {high}")
    turns = _turns(total_steps, rise, three_phases=three_phases)
    return _path(step, turns, [high, low, *([high] if three_phases else []), high], shape)


def _turns(total_steps: int, rise: float, *, three_phases: bool) -> list[float]:
    """The ends of the phases, perhaps between two steps, as in torch's OneCycleLR."""
    top = rise * total_steps - 1.0
    turns = [0.0, top, *([2.0 * top] if three_phases else []), total_steps - 1.0]
    # A rise of 1 / total_steps, which starts at the peak, is allowed up to rounding (1e-9).
    if not (top >= -1e-9 and turns[-2] < turns[-1]):
        raise ValueError(
            f"rise = {rise} of {total_steps} steps leaves a phase less than a step: take a longer run, or a "
            f"rise from {1 / max(1, total_steps):.2g} to below {0.5 if three_phases else 1}"
        )
    return turns


def _path(step: int, turns: list[float], values: list[float], shape: str) -> float:
    """Interpolate between the values, each of which is reached at its turn."""
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    if shape not in ("cosine", "linear"):
        raise ValueError(f"shape must be 'cosine' or 'linear', got {shape!r}")
    step = min(step, int(turns[-1]))
    phase = next(k for k, turn in enumerate(turns[1:]) if step <= turn)
    length = turns[phase + 1] - turns[phase]
    progress = (step - turns[phase]) / length if length > 1e-9 else 1.0
    if shape == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return values[phase] + (values[phase + 1] - values[phase]) * progress
