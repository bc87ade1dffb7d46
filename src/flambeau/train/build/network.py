"""The network of a run and what is done to its images, made from the settings and the facts of the data."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.errors import InputError
from flambeau.train.settings.settings import Settings
from flambeau.train.build.device import pick_device
from flambeau.train.build.model import build_model, check_output
from flambeau.train.build.defaults import DataFacts


def make_model(settings: Settings, facts: DataFacts, *, pretrained: bool = False) -> nn.Module:
    """The model of a run on its device, in the memory format that convolutions are fastest in."""
    assert settings.model is not None
    shape = _shape(settings, facts)
    model = build_model(
        settings.model, pretrained=pretrained, drop_path=settings.drop_path, **shape
    )
    check_output(model, **shape)
    return model.to(pick_device(settings.device), memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def normalizer(facts: DataFacts, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function from uint8 images (N, C, H, W) to normalised float32 ones, on the device."""
    mean = torch.tensor(facts.mean, device=device).mul_(255).view(1, -1, 1, 1)
    std = torch.tensor(facts.std, device=device).mul_(255).view(1, -1, 1, 1)

    def normalize(images: Tensor) -> Tensor:
        return images.to(torch.float32, memory_format=torch.channels_last).sub_(mean).div_(std)

    return normalize


def check_training(
    model: nn.Module, settings: Settings, facts: DataFacts, *, world: int = 1
) -> None:
    """Refuse a model that cannot train, or not on the smallest batch of an epoch, if that is one image."""
    assert settings.batch_size is not None
    num_images, accumulate = facts.train_samples, settings.accumulate
    lone = num_images % (settings.batch_size * accumulate) == 1
    lone = lone or settings.batch_size < 2 * (1 if settings.sync_bn else world)
    try:
        check_output(model, **_shape(settings, facts), num_images=2 - lone, training=True)
    except InputError as error:
        if not lone or not isinstance(error.__cause__, ValueError):
            raise
        sizes = itertools.count(2 * world)
        good = next(size for size in sizes if num_images % (size * accumulate) != 1)
        raise InputError(
            f"batch_size = {settings.batch_size} leaves a batch of one image{' a process' * (world > 1)}, on "
            f"which this model cannot train: {error.__cause__}\nUse another one, such as --batch-size {good}"
        ) from error


def _shape(settings: Settings, facts: DataFacts) -> dict[str, Any]:
    assert settings.image_size is not None
    return {
        "num_classes": len(facts.classes),
        "channels": facts.channels,
        "image_size": settings.image_size,
    }
