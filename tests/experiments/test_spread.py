"""Intervals over folds and seeds, beside SciPy."""

import math

import numpy as np
import pytest
from scipy import stats

from flambeau.experiments.spread import no_difference_seen, spread_of, t_quantile


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 10, 31, 99])
def test_quantiles_of_students_t(freedom: int) -> None:
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)


def test_over_seeds_the_usual_interval() -> None:
    values = [0.9, 0.92, 0.87, 0.91]
    spread = spread_of(values, folds=False)
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert (spread.low, spread.high) == pytest.approx((low, high))
    assert spread.std == pytest.approx(np.std(values, ddof=1))


def test_over_folds_the_corrected_one() -> None:
    values = [0.9, 0.92, 0.87, 0.91, 0.88]
    spread = spread_of(values, folds=True)
    variance = (1 / 5 + 1 / 4) * np.var(values, ddof=1)  # Nadeau and Bengio, a fifth tested
    margin = stats.t.ppf(0.975, 4) * math.sqrt(variance)
    assert (spread.low, spread.high) == pytest.approx(
        (np.mean(values) - margin, np.mean(values) + margin)
    )
    assert "not independent" in spread.how


def test_one_run_has_no_spread() -> None:
    spread = spread_of([0.5], folds=False)
    assert spread.mean == 0.5
    assert math.isnan(spread.std)
    assert math.isnan(spread.low)


def test_differences_pair_by_pair() -> None:
    base = [0.5, 0.7, 0.6, 0.8, 0.65]
    better = [value + 0.02 + 0.001 * number for number, value in enumerate(base)]
    assert not no_difference_seen(better, base, folds=True)
    assert no_difference_seen([0.6, 0.6, 0.7, 0.7, 0.66], base, folds=True)
