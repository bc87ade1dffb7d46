"""Figures of masks against scikit-learn, torchmetrics and SciPy."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from sklearn.metrics import accuracy_score, f1_score, jaccard_score, recall_score
from torch import Tensor
from torchmetrics.classification import MulticlassJaccardIndex

from flambeau.data.sources.masks.mask_file import IGNORED
from flambeau.trainer.evaluation.mask_figures import (
    MaskCounts,
    boundary_f1,
    counted,
    mean_of_defined,
)


def drawn(seed: int, *, num: int = 4, ignored: bool = True) -> tuple[Tensor, Tensor]:
    """Predicted and given masks (5, 20, 24) in blobs, with a class that occurs in neither."""
    draw = np.random.default_rng(seed)

    def blobs() -> np.ndarray:
        noise = draw.normal(size=(5, 20, 24, num))
        return ndimage.gaussian_filter(noise, (0, 2, 2, 0)).argmax(3)

    given, predicted = blobs(), blobs()
    predicted = np.where(draw.random(given.shape) < 0.6, given, predicted)
    if ignored:
        given[draw.random(given.shape) < 0.1] = IGNORED
    return torch.from_numpy(predicted), torch.from_numpy(given.astype(np.uint8))


@pytest.mark.parametrize("seed", range(5))
def test_equal_to_others(seed: int) -> None:
    predicted, given = drawn(seed, ignored=bool(seed % 2))
    counts = MaskCounts(*counted(predicted, given, 5))
    known = given != IGNORED
    truth, said = given[known].numpy(), predicted[known].numpy()
    labels = range(4)
    for ours, theirs in (
        (counts.iou, jaccard_score(truth, said, average=None, labels=labels)),
        (counts.dice, f1_score(truth, said, average=None, labels=labels)),
        (counts.accuracy, recall_score(truth, said, average=None, labels=labels)),
    ):
        assert ours[:4].numpy() == pytest.approx(theirs)
        assert math.isnan(ours[4])  # in neither
    assert counts.pixel_accuracy == pytest.approx(accuracy_score(truth, said))
    reference = MulticlassJaccardIndex(4, average="macro", ignore_index=IGNORED)
    assert mean_of_defined(counts.iou) == pytest.approx(float(reference(predicted, given.long())))


def test_of_single_images_and_of_images_without_any_known_pixel() -> None:
    predicted, given = drawn(7)
    given[2] = IGNORED
    counts = MaskCounts(*counted(predicted, given, 4))
    for k in (0, 1, 3, 4):
        known = given[k] != IGNORED
        truth, said = given[k][known].numpy(), predicted[k][known].numpy()
        expected = jaccard_score(truth, said, average="macro", labels=np.union1d(truth, said))
        assert float(counts.image_iou[k]) == pytest.approx(expected)
    assert math.isnan(counts.image_iou[2])
    assert counts.there[2].sum() == counts.predicted[2].sum() == 0
    # A batch counts as its parts do.
    parts = [counted(predicted[k : k + 1], given[k : k + 1], 4) for k in range(5)]
    for whole, pieces in zip(counted(predicted, given, 4), zip(*parts, strict=True), strict=True):
        assert torch.equal(whole, torch.cat(pieces))


def reference_boundary_f1(said: np.ndarray, truth: np.ndarray, number: int, limit: float) -> float:
    """By distances to the other boundary, pixel by pixel."""

    def boundary(mask: np.ndarray) -> np.ndarray:
        found = np.zeros(mask.shape, bool)
        for y, x in np.argwhere((mask == number) & (truth != IGNORED)):
            for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0)):
                row, column = y + dy, x + dx
                inside = 0 <= row < mask.shape[0] and 0 <= column < mask.shape[1]
                if inside and truth[row, column] != IGNORED and mask[row, column] != number:
                    found[y, x] = True
        return found

    ours, theirs = boundary(said), boundary(truth)
    if not ours.any() and not theirs.any():
        return math.nan
    if not ours.any() or not theirs.any():
        return 0.0
    precision = (ndimage.distance_transform_edt(~theirs)[ours] <= limit).mean()
    recall = (ndimage.distance_transform_edt(~ours)[theirs] <= limit).mean()
    return 2 * precision * recall / max(precision + recall, 1e-12)


@pytest.mark.parametrize("size", [24, 300])
def test_boundaries(size: int) -> None:
    draw = np.random.default_rng(size)
    noise = ndimage.gaussian_filter(draw.normal(size=(2, size, size, 3)), (0, 3, 3, 0))
    given = noise.argmax(3).astype(np.uint8)
    said = np.roll(given, 1, axis=2)
    given[:, :4] = IGNORED
    limit = max(1, round(0.0075 * math.hypot(size, size)))
    ours = boundary_f1(torch.from_numpy(said.astype(np.int64)), torch.from_numpy(given), 4)
    for k in range(2):
        for number in range(4):
            expected = reference_boundary_f1(said[k], given[k], number, limit)
            assert float(ours[k, number]) == pytest.approx(expected, abs=1e-6, nan_ok=True)
    exact = torch.from_numpy(given)
    same = boundary_f1(exact.long().clamp(max=2), exact, 3)
    assert torch.allclose(same, torch.ones_like(same))
