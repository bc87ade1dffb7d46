"""Networks with logits for each pixel: a decoder over the features of a classifier, and others' in one form.

Source: Lin et al., "Feature pyramid networks for object detection", CVPR 2017, section 3, with normalization
after each convolution, and a mask from the finest level alone.

N: images, C: channels, K: classes, S: side in pixels.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

_WIDTH = 128  # channels of the decoder; chosen
_FINE_SIZE = 128  # up to this image size, pixels, the decoder begins at half of it, else at a quarter; chosen


class PyramidSegmenter(nn.Module):
    """Logits (N, K, S, S): the features of an encoder, merged from the coarsest to the finest.

    The encoder is of timm, made with `features_only=True`.
    """

    def __init__(self, encoder: nn.Module, num_classes: int, *, image_size: int) -> None:
        super().__init__()
        self.encoder = encoder
        info: Any = encoder.feature_info
        least = 2 if image_size <= _FINE_SIZE else 4
        reductions = info.reduction()
        self._used = [at for at, times in enumerate(reductions) if times >= least]
        channels = [info.channels()[at] for at in self._used]
        self.lateral = nn.ModuleList(nn.Conv2d(count, _WIDTH, 1) for count in channels)
        self.smooth = nn.ModuleList(_convolution() for _ in channels)
        self.head = nn.Conv2d(_WIDTH, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, C, S, S)."""
        features = self.encoder(x)
        merged: Tensor | None = None
        for at in reversed(range(len(self._used))):
            level = self.lateral[at](features[self._used[at]])
            if merged is not None:
                level = level + F.interpolate(merged, level.shape[-2:], mode="nearest")
            merged = self.smooth[at](level)
        assert merged is not None
        return F.interpolate(self.head(merged), x.shape[-2:], mode="bilinear", align_corners=False)


class MainOutput(nn.Module):
    """A torchvision network with outputs by name, as one that returns the main one."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images (N, C, S, S)."""
        logits: Tensor = self.network(x)["out"]
        return logits


def _convolution() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False),
        nn.BatchNorm2d(_WIDTH),
        nn.ReLU(inplace=True),
    )
