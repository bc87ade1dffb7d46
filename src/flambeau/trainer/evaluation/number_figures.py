"""Figures of predicted numbers.

N: images, K: columns of numbers. A missing one is NaN and counts nowhere.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.trainer.evaluation.label_figures import mean_of_known


@dataclass(frozen=True, slots=True)
class NumberFigures:
    """One column, in its unit.

    Attributes:
        mae: mean absolute error.
        rmse: root of the mean squared error.
        r2: 1 - squared error / squared deviation from the mean; None if all numbers are equal.
        spearman: rank correlation of predictions and numbers; None if one of them is constant.
        num_images: with a number.
    """

    name: str
    mae: float | None
    rmse: float | None
    r2: float | None
    spearman: float | None
    num_images: int


def figures_of_column(name: str, predicted: Tensor, numbers: Tensor) -> NumberFigures:
    """Figures of a column, of predictions and numbers (N,)."""
    known = numbers.isfinite()
    given = numbers[known].double()
    said = predicted[known].double()
    if not len(given):
        return NumberFigures(name, None, None, None, None, 0)
    error = said - given
    spread = (given - given.mean()).square().sum()
    return NumberFigures(
        name,
        mae=float(error.abs().mean()),
        rmse=float(error.square().mean().sqrt()),
        r2=float(1 - error.square().sum() / spread) if spread > 0 else None,
        spearman=_correlation(ranks(said), ranks(given)),
        num_images=len(given),
    )


def ranks(values: Tensor) -> Tensor:
    """(N,) float64 ranks from 1; equal values share the mean of theirs."""
    _, group, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    means: Tensor = ends - (counts - 1) / 2
    return means[group]


def _correlation(one: Tensor, other: Tensor) -> float | None:
    one, other = one - one.mean(), other - other.mean()
    scale = (one.square().sum() * other.square().sum()).sqrt()
    return float((one * other).sum() / scale) if scale > 0 else None


def mean_figure(columns: list[NumberFigures], name: str) -> float:
    """The mean of a figure over the columns that have it, each in its unit; NaN with none."""
    values = [getattr(one, name) for one in columns]
    return mean_of_known(torch.tensor([math.nan if v is None else v for v in values]).double())
