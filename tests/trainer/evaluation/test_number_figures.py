"""Figures of predicted numbers, against scikit-learn and SciPy."""

import math

import pytest
import torch
from scipy.stats import rankdata, spearmanr
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from flambeau.trainer.evaluation.number_figures import figures_of_column, mean_figure, ranks


@pytest.mark.parametrize("levels", [0, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_figures_are_those_of_others(seed: int, levels: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    numbers = 20 + 5 * torch.randn(73, generator=draw)
    predicted = numbers + 3 * torch.randn(73, generator=draw)
    if levels:
        numbers, predicted = (one.div(levels).round() for one in (numbers, predicted))
    with_gaps = numbers.clone()
    with_gaps[::7] = math.nan
    known = with_gaps.isfinite()
    given = numbers[known].double()
    said = predicted[known].double()
    found = figures_of_column("age", predicted, with_gaps)
    assert found.num_images == int(known.sum())
    assert found.mae == pytest.approx(mean_absolute_error(given, said))
    assert found.rmse == pytest.approx(mean_squared_error(given, said) ** 0.5)
    assert found.r2 == pytest.approx(r2_score(given, said))
    assert found.spearman == pytest.approx(spearmanr(given, said).statistic)
    torch.testing.assert_close(ranks(said), torch.from_numpy(rankdata(said)))


def test_what_is_not_defined_is_none() -> None:
    equal = figures_of_column("a", torch.tensor([1.0, 2.0]), torch.tensor([3.0, 3.0]))
    assert (equal.mae, equal.r2, equal.spearman) == (1.5, None, None)
    empty = figures_of_column("b", torch.tensor([1.0]), torch.tensor([math.nan]))
    assert (empty.mae, empty.rmse, empty.num_images) == (None, None, 0)
    assert mean_figure([equal, empty], "mae") == 1.5
    assert math.isnan(mean_figure([equal, empty], "r2"))
