"""Figures of predicted masks, from what is counted of each image.

Source: the mean intersection over union of Pascal VOC: Everingham et al., "The Pascal Visual Object Classes
challenge: a retrospective", IJCV 2015, section 3.3; the boundary F1: Csurka et al., "What is a good
evaluation measure for semantic segmentation?", BMVC 2013, section 3.2.

N: images, K: classes, S: side in pixels.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from flambeau.data.sources.masks.mask_file import IGNORED

_TOLERANCE = 0.0075  # of the diagonal, within which boundaries agree; as in the source
_CROSS = ((0, 1, 0), (1, 1, 1), (0, 1, 0))


@dataclass(frozen=True)
class MaskCounts:
    """Known pixels of N images, by class, (N, K) int64: predicted rightly, predicted, and there."""

    right: Tensor
    predicted: Tensor
    there: Tensor

    @property
    def iou(self) -> Tensor:
        """(K,) float64, each class's intersection over union, over all images; NaN if in neither."""
        right, predicted, there = self._sums()
        return right / (predicted + there - right)

    @property
    def dice(self) -> Tensor:
        """(K,) float64, F1 of each class's pixels, over all images; NaN if in neither."""
        right, predicted, there = self._sums()
        return 2 * right / (predicted + there)

    @property
    def accuracy(self) -> Tensor:
        """(K,) float64, the share of each class's pixels predicted as it; NaN without any."""
        right, _, there = self._sums()
        return right / there

    @property
    def pixel_accuracy(self) -> float:
        """The share of all known pixels that are right."""
        right, _, there = self._sums()
        return float(right.sum() / there.sum())

    @property
    def image_iou(self) -> Tensor:
        """(N,) float64, the mean over classes in each image's mask or prediction, or NaN."""
        union = self.predicted + self.there - self.right
        iou = self.right.double() / union
        return iou.nanmean(1)

    def _sums(self) -> tuple[Tensor, ...]:
        return tuple(one.sum(0).double() for one in (self.right, self.predicted, self.there))


def counted(predicted: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """`MaskCounts.right`, `predicted` and `there`, of classes (N, S, S), without waiting for the device."""
    known = targets != IGNORED
    row = torch.arange(len(targets), device=targets.device).view(-1, 1, 1) * num_classes
    wanted = targets.long().clamp(max=num_classes - 1)

    def count(classes: Tensor, counts: Tensor) -> Tensor:
        table = torch.zeros(len(targets) * num_classes, dtype=torch.int64, device=targets.device)
        table.index_add_(0, (row + classes).flatten(), counts.flatten().long())
        return table.view(-1, num_classes)

    right = known & (predicted == wanted)
    return count(wanted, right), count(predicted, known), count(wanted, known)


def mean_of_defined(values: Tensor) -> float:
    """The mean of the values that are not NaN; NaN without any."""
    return float(values.nanmean()) if len(values) else math.nan


def boundary_f1(predicted: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """How well each class's boundaries agree in each image, (N, K) float32; NaN where it has none.

    A boundary pixel of a class is known, of it, and beside a known one of another. It agrees if the other
    mask has one within 0.75 % of the diagonal.
    """
    height, width = targets.shape[1:]
    radius = max(1, round(_TOLERANCE * math.hypot(height, width)))
    offsets = torch.arange(-radius, radius + 1, device=targets.device)
    disc = (offsets[:, None] ** 2 + offsets**2 <= radius**2).float()[None, None]
    known = targets != IGNORED
    scores = torch.full((len(targets), num_classes), torch.nan, device=targets.device)
    for number in range(num_classes):
        ours, theirs = (_boundary(one == number, known) for one in (predicted, targets))
        precision = _within(ours, theirs, disc)
        recall = _within(theirs, ours, disc)
        f1 = 2 * precision * recall / (precision + recall).clamp(min=1e-12)
        is_there = ours.flatten(1).any(1) | theirs.flatten(1).any(1)
        scores[:, number] = torch.where(is_there, f1, torch.nan)
    return scores


def _boundary(of_class: Tensor, known: Tensor) -> Tensor:
    """(N, S, S) bool: pixels of a class beside known ones of others."""
    others = (known & ~of_class).float()[:, None]
    cross = torch.tensor(_CROSS, dtype=torch.float32, device=of_class.device)[None, None]
    beside = F.conv2d(others, cross, padding=1)[:, 0] > 0.5
    return of_class & known & beside


def _within(one: Tensor, other: Tensor, disc: Tensor) -> Tensor:
    """(N,) the share of the boundary pixels of one mask that are near those of the other; 0 without any."""
    near = F.conv2d(other.float()[:, None], disc, padding=disc.shape[-1] // 2)[:, 0] > 0.5
    return (one & near).flatten(1).sum(1) / one.flatten(1).sum(1).clamp(min=1)
