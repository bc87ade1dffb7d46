"""What looks wrong with the pixels that a trained model is given: another scale than in its training."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flambeau.data.datasets.image_statistics import mean_std
from flambeau.data.sources.source import Source, pixel_kind, same_unit
from flambeau.data.sources.wide_source import of_kind
from flambeau.errors import InputError
from flambeau.trainer.prediction.trained_model import Trained

# All chosen. The mean of photographs, by night or overexposed, stays within 2 deviations of that of others.
_NUM_IMAGES = 32
_FAR = 4.0  # standard deviations between two means
_WIDE = 10.0  # times the standard deviation
_NARROW = 1 / 30
_FEW = 8  # images of which some may be blank


def pixel_remarks(trained: Trained, source: Source) -> list[str]:
    """A line if pixels are far from the run's mean and standard deviation.

    Nothing where another check refuses the images.
    """
    facts = trained.facts
    source = of_kind(source, facts.pixels, facts.channels)
    if not same_unit(pixel_kind(source), facts.pixels):
        return []
    try:
        mean, std = mean_std(source, channels=facts.channels, limit=_NUM_IMAGES)
    except InputError:  # none can be read
        return []
    return _remarks(trained, mean, std, len(source))


def batch_remarks(trained: Trained, x_NCHW: Tensor) -> list[str]:
    """As `pixel_remarks`, of images that have been read."""
    x = x_NCHW.double() / (255 if x_NCHW.dtype == torch.uint8 else 1)
    mean, std = (
        [float(f"{number:.4g}") for number in numbers]
        for numbers in (x.mean((0, 2, 3)), x.std((0, 2, 3), correction=0))
    )
    return _remarks(trained, mean, std, len(x))


def _remarks(
    trained: Trained, mean: Sequence[float], std: Sequence[float], count: int
) -> list[str]:
    facts = trained.facts
    off = max(abs(a - b) / c for a, b, c in zip(mean, facts.mean, facts.std, strict=True))
    ratios = [a / b for a, b in zip(std, facts.std, strict=True)]
    is_narrow = max(ratios) < _NARROW and count >= _FEW
    if off <= _FAR and max(ratios) <= _WIDE and not is_narrow:
        return []
    return [
        f"these pixels have mean {mean} and standard deviation {std}, and the run was trained on mean "
        f"{facts.mean} and {facts.std}: their scale may be another one, and the answers wrong"
    ]
