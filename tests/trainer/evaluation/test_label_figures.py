"""Figures of several labels per image, against scikit-learn and torchmetrics.

torchmetrics is imported where it is used: it takes a second, which each process of pytest would spend.
"""

import math

import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, hamming_loss
from torch import Tensor

from flambeau.trainer.evaluation.label_figures import (
    average_precisions,
    best_thresholds,
    counted,
    mean_of_known,
)


def made(seed: int, num: int, labels: int, *, levels: int = 0) -> tuple[Tensor, Tensor]:
    """Probabilities, with ties if there are few levels, and labels that they say something of."""
    draw = torch.Generator().manual_seed(seed)
    scores = torch.rand(num, labels, generator=draw)
    if levels:
        scores = (scores * levels).round() / levels
    wanted = (scores + 0.7 * torch.randn(num, labels, generator=draw) > 0.6).float()
    return scores, wanted


@pytest.mark.parametrize("levels", [0, 5])
@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_that_of_scikit_learn(seed: int, levels: int) -> None:
    from torchmetrics.functional.classification import multilabel_average_precision

    scores, wanted = made(seed, 97, 6, levels=levels)
    found = average_precisions(scores, wanted)
    expected = [average_precision_score(wanted[:, k], scores[:, k]) for k in range(6)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    mean = multilabel_average_precision(scores, wanted.long(), num_labels=6)
    assert mean_of_known(found) == pytest.approx(float(mean), abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_unknown_labels_count_nowhere(seed: int) -> None:
    scores, wanted = made(seed, 60, 4)
    unknown = torch.rand(60, 4, generator=torch.Generator().manual_seed(seed + 100)) < 0.3
    found = average_precisions(scores, wanted.masked_fill(unknown, math.nan))
    counts = counted(scores, wanted.masked_fill(unknown, math.nan), torch.full((4,), 0.5))
    for k in range(4):
        known = ~unknown[:, k]
        expected = average_precision_score(wanted[known, k], scores[known, k])
        assert float(found[k]) == pytest.approx(expected)
        assert int(counts.known[k]) == int(known.sum())
        expected = f1_score(wanted[known, k], scores[known, k] >= 0.5)
        assert float(counts.f1[k]) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_f1_and_hamming_are_those_of_scikit_learn(seed: int) -> None:
    scores, wanted = made(seed, 80, 5)
    thresholds = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    counts = counted(scores, wanted, thresholds)
    said = scores >= thresholds
    assert counts.micro_f1 == pytest.approx(f1_score(wanted, said, average="micro"))
    assert counts.macro_f1 == pytest.approx(f1_score(wanted, said, average="macro"))
    assert counts.hamming_loss == pytest.approx(hamming_loss(wanted, said))


def test_a_label_that_no_image_has() -> None:
    scores, wanted = made(0, 30, 3)
    wanted[:, 1] = 0
    found = average_precisions(scores, wanted)
    assert found.isnan().tolist() == [False, True, False]
    assert mean_of_known(found) == pytest.approx(float(found[[0, 2]].mean()))
    assert best_thresholds(scores, wanted)[1] == 0.5
    nothing = counted(scores * 0, wanted * 0, torch.full((3,), 0.5))
    assert math.isnan(nothing.macro_f1) and math.isnan(nothing.micro_f1)
    assert nothing.hamming_loss == 0


@pytest.mark.parametrize("levels", [0, 4])
@pytest.mark.parametrize("seed", range(2))  # scikit-learn takes 2 ms for each threshold
def test_no_other_threshold_has_a_higher_f1(seed: int, levels: int) -> None:
    scores, wanted = made(seed, 50, 3, levels=levels)
    thresholds = best_thresholds(scores, wanted)
    found = counted(scores, wanted, torch.tensor(thresholds)).f1
    for k in range(3):
        others = [*scores[:, k].tolist(), 0.0, 1.1]
        best = max(f1_score(wanted[:, k], scores[:, k] >= limit) for limit in others)
        assert float(found[k]) == pytest.approx(best)
        assert 0 <= thresholds[k] <= 1
