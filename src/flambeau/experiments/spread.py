"""Mean, spread and a confidence interval of figures of several runs, by how these runs differ."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Spread:
    """Of one figure over several runs.

    Attributes:
        std: the sample's standard deviation; NaN for one value.
        low, high: ends of the interval of 95 %; NaN for one value.
        how: how it was made, in one sentence.
    """

    mean: float
    std: float
    low: float
    high: float
    how: str


def spread_of(values: Sequence[float], *, folds: bool) -> Spread:
    """The spread of the figure of one setting.

    Models of folds have learned mostly from the same images, so the usual variance of the mean, s**2 / k, is
    too small. Nadeau and Bengio (Inference for the generalization error, Machine Learning 52, 2003) add the
    ratio of tested to learned images: s**2 * (1 / k + 1 / (k - 1)).

    Args:
        values: one per fold (the mean over its seeds), or per seed.
        folds: they are of one cross-validation.
    """
    count = len(values)
    mean = statistics.fmean(values)
    if count < 2:
        return Spread(mean, math.nan, math.nan, math.nan, "one run: nothing is known of its spread")
    std = statistics.stdev(values)
    factor = 1 / count + (1 / (count - 1) if folds else 0.0)
    margin = t_quantile(count - 1) * std * math.sqrt(factor)
    how = (
        f"95 % by Student's t over {count} folds, with the correction of Nadeau and Bengio, because "
        "folds are not independent"
        if folds
        else f"95 % by Student's t over {count} seeds; it says nothing of other images"
    )
    return Spread(mean, std, mean - margin, mean + margin, how)


def no_difference_seen(one: Sequence[float], other: Sequence[float], *, folds: bool) -> bool:
    """Whether the interval of the differences, pair by pair, has 0 in it."""
    differences = spread_of([a - b for a, b in zip(one, other, strict=True)], folds=folds)
    return not (differences.low > 0 or differences.high < 0)


def t_quantile(freedom: int) -> float:
    """The t for which Student's distribution has 95 % between -t and t.

    By the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4.

    Example:
        >>> round(t_quantile(4), 3)
        2.776
    """
    low = 0.0
    high = 1e3
    for _ in range(100):
        middle = (low + high) / 2
        if _between(middle, freedom) < _CONFIDENCE:
            low = middle
        else:
            high = middle
    return high


def _between(t: float, freedom: int) -> float:
    """The probability of a value from -t to t."""
    angle = math.atan(t / math.sqrt(freedom))
    cosine = math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = 0.0
    for step in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (step - 1) / step
    if freedom % 2:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
