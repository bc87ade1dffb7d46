"""Schedules made of others: joined at steps, behind a warm-up, or drawn through points.

由其他调度组成的学习率调度：在指定步拼接、加上预热，或经过给定的点。

Source: warm-up after Goyal et al., arXiv 1706.02677, section 2.2: step k of it gives (k + 1) / (steps + 1)
of the first rate, so that it is never 0, and it ends where the schedule begins.

Not for a single schedule with a warm-up of its own: give that its `warmup_steps`.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

Schedule = Callable[[int], float]


def chain(pieces: Sequence[tuple[int, Schedule]], last: Schedule) -> Schedule:
    """Join schedules: each runs for its steps, then the next one begins at its own step 0.

    Args:
        pieces: (steps, schedule), each at least one step; a schedule takes steps since its piece began.
        last: runs from there on, for ever.

    Returns:
        A function from the step of the run to the multiplier.

    Raises:
        ValueError: a piece of no steps; by the function: a step below 0.

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
        schedule: from the step, counted from the end of the warm-up, to the multiplier.
        warmup_steps: at least 0.

    Returns:
        A function from the step of the run to the multiplier; never 0 in the warm-up unless the schedule
        begins with 0, and never growing after it unless the schedule does.

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
    """Straight lines from point to point; before the first and after the last it stays at their values.

    Args:
        step: optimizer steps already made, from 0.
        points: (step, multiplier), at least one, steps rising and multipliers at least 0.

    Returns:
        The factor for the base rate.

    Raises:
        ValueError: no points, in another order, or a negative number.

    Example:
        >>> [piecewise_linear(s, points=[(0, 0.5), (2, 1.0), (6, 0.0)]) for s in (0, 1, 2, 4, 6, 9)]
        [0.5, 0.75, 1.0, 0.5, 0.0, 0.0]
    """
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")
    steps = [at for at, _ in points]
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
