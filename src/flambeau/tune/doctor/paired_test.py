"""Whether a change made a script faster: a t test on pairs of runs, one without and one with it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# One-sided 95 % points of Student's t for 1, 2, 3 ... degrees of freedom.
_T_95 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812)


@dataclass(frozen=True)
class Gain:
    """Steps per second with a change over those without.

    Attributes:
        low, high: one-sided 95 % bounds; NaN for a single pair.
        least: the smallest ratio of a pair; NaN if unknown.
    """

    times: float
    low: float
    high: float
    least: float = math.nan

    @property
    def is_tested(self) -> bool:
        return not math.isnan(self.low)

    @property
    def verdict(self) -> str:
        """'faster' or 'slower' by a one-sided t test at 95 %, else 'no difference seen'."""
        if not self.is_tested:
            return "one pair of runs, no test"
        if self.low > 1.0:
            return "faster"
        return "slower" if self.high < 1.0 else "no difference seen"


def gain_of(before_s: Sequence[float], after_s: Sequence[float]) -> Gain:
    """One-sided t test on the logarithms of the ratios of seconds per step, pair by pair."""
    logs = [math.log(before / after) for before, after in zip(before_s, after_s, strict=True)]
    if not logs:
        raise ValueError("a gain needs at least one pair of runs")
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Gain(math.exp(mean), math.nan, math.nan, math.exp(mean))
    freedom = min(len(logs) - 1, len(_T_95))
    margin = _T_95[freedom - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    bounds = math.exp(mean - margin), math.exp(mean + margin)
    return Gain(math.exp(mean), *bounds, least=math.exp(min(logs)))
