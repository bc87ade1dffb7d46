"""The network of the preset speedrun without one of its ingredients, for `bench/speedrun.py --ablate`."""

from typing import Any

from torch import Tensor, nn

from flambeau.recipes.models.speedrun_convnet import SpeedrunConvNet


class _WithoutWhitening(SpeedrunConvNet):
    """Its first layer is drawn at random and learned."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__(channels, num_classes)
        self.whiten.reset_parameters()
        self.whiten.weight.requires_grad_(True)

    def init_from_images(self, images_NCHW: Tensor) -> None:
        """Nothing is made from them."""


def without_whitening(*, num_classes: int, channels: int) -> nn.Module:
    return _WithoutWhitening(channels, num_classes)


def without_identities(*, num_classes: int, channels: int) -> nn.Module:
    model = SpeedrunConvNet(channels, num_classes)
    for conv in _those(model.groups, nn.Conv2d):
        conv.reset_parameters()
    return model


def with_learned_scales(*, num_classes: int, channels: int) -> nn.Module:
    model = SpeedrunConvNet(channels, num_classes)
    for norm in _those(model.groups, nn.BatchNorm2d):
        norm.weight.requires_grad_(True)
    return model


def _those(model: nn.Module, kind: type[nn.Module]) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]
