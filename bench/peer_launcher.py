"""Runs somebody's training script with a seed, and with a network small enough for one core.

    python bench/peer_launcher.py SEED SCRIPT FOLDER [ARGUMENTS OF THE SCRIPT]

SCRIPT may be a copy; its neighbors are imported from FOLDER. The network is called `small_resnet` in
`torchvision.models`: 0.3 million weights, on images that it averages down to 64 x 64 pixels.
"""

import random
import runpy
import sys

import numpy as np
import torch
import torchvision
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.around = nn.Sequential(
            nn.AvgPool2d(stride), nn.Conv2d(channels_in, channels, 1, bias=False), nn.BatchNorm2d(channels)
        )  # fmt: skip

    def forward(self, x_NCHW: Tensor) -> Tensor:
        return torch.relu(self.body(x_NCHW) + self.around(x_NCHW))


def small_resnet(*, num_classes: int = 1000, weights: None = None) -> nn.Module:
    """A residual network of three blocks; there are no weights of it."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(64), nn.Conv2d(3, 32, 4, 4, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        Block(32, 32, 1), Block(32, 64, 2), Block(64, 128, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, num_classes),
    )  # fmt: skip


def main() -> None:
    seed, script, folder, *arguments = sys.argv[1:]
    torchvision.models.small_resnet = small_resnet
    torchvision.models._api.register_model()(small_resnet)
    random.seed(int(seed))
    np.random.seed(int(seed))
    torch.manual_seed(int(seed))
    sys.path.append(folder)  # at the end: timm's holds a timm of its own beside the script
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
