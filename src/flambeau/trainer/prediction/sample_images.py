"""Some images of a source as the network sees them, to measure a model and its ranges."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.data.sources.source import Source, SubsetSource
from flambeau.errors import InputError
from flambeau.trainer.prediction.trained_model import Trained, read_for

RANGE_IMAGES = 256
"""Images to measure ranges on: more change them little, and all tensors of each are kept."""


@dataclass(frozen=True)
class SampleImages:
    """Images of a source, evenly spread over it.

    Attributes:
        pixels: (N, S, S, C) uint8, or float32 in the unit of the training.
        labels: (N,) int64, of the classes of the run; None: unknown.
    """

    pixels: Tensor
    labels: Tensor | None
    total: int

    def __len__(self) -> int:
        return len(self.pixels)

    def normalized(self, trained: Trained) -> list[Tensor]:
        """Batches (at most 32, C, S, S) float32 of normalized images, on the device."""
        images = self.pixels.permute(0, 3, 1, 2).to(trained.device)
        return [trained.normalize(part) for part in images.split(32)]


def read_images(trained: Trained, source: Source, most: int) -> SampleImages:
    """Read at most so many images; unreadable ones are left out."""
    chosen = torch.linspace(0, len(source) - 1, min(most, len(source))).round().long()
    part = SubsetSource(source, chosen)
    loader, _ = read_for(trained, part, workers=0, skip_bad_images=len(part))
    pixels, labels = [], []
    for micro in loader.stream(epoch=0, position=0, epochs=1):
        pixels.append(micro.data[0].permute(0, 2, 3, 1))
        labels.append(micro.data[1])
    if not sum(map(len, labels)):
        raise InputError(f"no image could be read; the first one is {source.describe(0)}")
    return SampleImages(torch.cat(pixels).contiguous(), torch.cat(labels), len(source))
