"""Real images as the network sees them, on which an export and its ranges are measured."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.data.sources.source import Source, SubsetSource
from flambeau.errors import InputError
from flambeau.train.prediction.trained_model import Trained, read_for


@dataclass(frozen=True)
class MeasuredImages:
    """Images of a source, evenly spread over it.

    Attributes:
        pixels: (N, S, S, C) uint8.
        labels: (N,) int64, of the classes of the run.
        total: how many there are in the source.
    """

    pixels: Tensor
    labels: Tensor
    total: int


def read_images(trained: Trained, source: Source, most: int) -> MeasuredImages:
    """Read at most so many images; those that cannot be read are left out.

    Raises:
        InputError: none can be read.
    """
    chosen = torch.linspace(0, len(source) - 1, min(most, len(source))).round().long()
    part = SubsetSource(source, chosen)
    loader, _ = read_for(trained, part, workers=0, skip_bad_images=len(part))
    pixels, labels = [], []
    for micro in loader.stream(epoch=0, position=0, epochs=1):
        pixels.append(micro.data[0].permute(0, 2, 3, 1))
        labels.append(micro.data[1])
    if not sum(map(len, labels)):
        raise InputError(f"no image could be read; the first one is {source.describe(0)}")
    return MeasuredImages(torch.cat(pixels).contiguous(), torch.cat(labels), len(source))
