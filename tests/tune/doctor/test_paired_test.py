"""The one-sided test on pairs, against SciPy's."""

import math

import numpy as np
import pytest
from scipy import stats

from flambeau.tune.doctor.paired_test import gain_of


@pytest.mark.parametrize("count", [2, 3, 5, 10])
def test_bounds_are_those_of_students_t(count: int) -> None:
    rng = np.random.default_rng(count)
    before, after = rng.uniform(1, 2, count), rng.uniform(0.5, 1.5, count)
    gain = gain_of(before.tolist(), after.tolist())
    logs = np.log(before / after)
    low = stats.ttest_1samp(logs, 0, alternative="greater").confidence_interval(0.95).low
    high = stats.ttest_1samp(logs, 0, alternative="less").confidence_interval(0.95).high
    assert gain.times == pytest.approx(math.exp(logs.mean()))
    assert gain.low == pytest.approx(math.exp(low), rel=1e-3)
    assert gain.high == pytest.approx(math.exp(high), rel=1e-3)
    p = stats.ttest_1samp(logs, 0, alternative="greater").pvalue
    assert (gain.verdict == "faster") == (p < 0.05)


def test_one_pair_decides_nothing() -> None:
    gain = gain_of([2.0], [1.0])
    assert gain.times == 2.0 and math.isnan(gain.low)
    assert gain.verdict == "one pair of runs, no test" and not gain.is_tested


def test_slower_is_said_too() -> None:
    assert gain_of([1.0, 1.01, 0.99], [2.0, 2.02, 1.97]).verdict == "slower"


def test_without_a_pair() -> None:
    with pytest.raises(ValueError, match="at least one pair"):
        gain_of([], [])
