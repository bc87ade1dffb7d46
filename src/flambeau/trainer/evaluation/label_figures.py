"""Figures of predictions of several labels per image.

N: images, K: labels. Labels are 1, 0, or NaN for unknown, which counts nowhere.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LabelCounts:
    """Of known labels, (K,) each: how often there, predicted, both; and how many are known."""

    known: Tensor
    there: Tensor
    predicted: Tensor
    right: Tensor

    @property
    def f1(self) -> Tensor:
        """(K,) float64; NaN where the label is neither there nor predicted."""
        return 2 * self.right.double() / (self.there + self.predicted)

    @property
    def micro_f1(self) -> float:
        """Of all labels together; NaN with none."""
        total = int((self.there + self.predicted).sum())
        return 2 * int(self.right.sum()) / total if total else math.nan

    @property
    def macro_f1(self) -> float:
        """The mean over the labels that are there or predicted; NaN with none."""
        return mean_of_known(self.f1)

    @property
    def hamming_loss(self) -> float:
        """The share of known labels that were predicted wrongly."""
        wrong = self.there.sum() + self.predicted.sum() - 2 * self.right.sum()
        return float(wrong / self.known.sum())


def counted(probabilities: Tensor, labels: Tensor, thresholds: Tensor) -> LabelCounts:
    """Counts of (N, K) probabilities and labels; a label is predicted from its threshold, (K,), on."""
    known = labels.isfinite()
    there = labels == 1
    predicted = (probabilities >= thresholds) & known
    right = there & predicted
    return LabelCounts(known.sum(0), there.sum(0), predicted.sum(0), right.sum(0))


def average_precisions(scores: Tensor, labels: Tensor) -> Tensor:
    """Each label's average precision, (K,) float64, of scores and labels (N, K); NaN for one that no image
    has.

    The sum of precision times the gain of recall; equal scores count together, as in scikit-learn's
    `average_precision_score`.
    """
    columns = zip(scores.T, labels.T, strict=True)
    return torch.tensor([_average_precision(*column) for column in columns], dtype=torch.float64)


def _average_precision(scores: Tensor, labels: Tensor) -> float:
    _, right, said = _by_threshold(scores, labels)
    if not len(right) or not right[-1]:
        return math.nan
    gain = torch.diff(right, prepend=right.new_zeros(1))
    return float((gain * right / said).sum() / right[-1])


def _by_threshold(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The different scores, falling; and of each how many labels are there, and images, from it on upward."""
    known = labels.isfinite()
    ordered, order = scores[known].sort(descending=True, stable=True)
    if not len(ordered):
        return ordered, ordered.double(), ordered.double()
    last = torch.cat([ordered[1:] != ordered[:-1], torch.tensor([True])])
    right = (labels[known][order] == 1).double().cumsum(0)[last]
    said = torch.arange(1, len(ordered) + 1, dtype=torch.float64)[last]
    return ordered[last], right, said


def precision_recall(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Recall, precision and score, (M,), at and above each different score of a label, falling.

    Recall is NaN if no image has the label.
    """
    values, right, said = _by_threshold(scores, labels)
    there = (labels == 1).sum()
    return right / there, right / said, values.double()


def best_thresholds(probabilities: Tensor, labels: Tensor) -> list[float]:
    """The probability from which on each label's F1 is highest; one half for a label that none has.

    It lies midway between the lowest that counts and the next.
    """
    thresholds = []
    for column, there in zip(probabilities.double().T, labels.T, strict=True):
        values, right, said = _by_threshold(column, there)
        if not len(right) or not right[-1]:
            thresholds.append(0.5)
            continue
        best = int((2 * right / (said + right[-1])).argmax())
        below = float(values[best + 1]) if best + 1 < len(values) else 0.0
        thresholds.append((float(values[best]) + below) / 2)
    return thresholds


def mean_of_known(values: Tensor) -> float:
    """The mean of those that are not NaN; NaN with none."""
    return float(values[~values.isnan()].mean())
