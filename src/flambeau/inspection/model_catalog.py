"""The models that --model takes by name: their input sizes and published weights."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torchvision.models
from torch import nn

from flambeau.errors import InputError
from flambeau.trainer.parts.model import OWN_MODELS, build_model

TORCHVISION = "torchvision:"
DEFAULT_SIZE = 224  # pixels, where a model was published for none
_SMALL_SIZE = 32  # pixels, for our own small models


@dataclass(frozen=True)
class CatalogEntry:
    """A model by its name.

    Attributes:
        parameters: their number with the published head, or 1000 classes; None: not counted yet.
        input_size: side of the images for its published weights, pixels; None: any.
        tags: names of timm's published weights; --pretrained takes the first.
    """

    name: str
    parameters: int | None
    input_size: int | None
    pretrained: bool
    tags: tuple[str, ...] = ()


def model_names(*, tags: bool) -> list[str]:
    """All names that --model takes; with `tags`, one NAME.TAG for each set of timm's published weights."""
    names = timm.list_models()
    if tags:
        published = timm.list_pretrained()
        with_tags = {name.partition(".")[0] for name in published}
        names = [name for name in names if name not in with_tags] + published
    known = torchvision.models.list_models(module=torchvision.models)  # classifiers
    return [*OWN_MODELS, *sorted(names), *sorted(f"{TORCHVISION}{name}" for name in known)]


def catalog_entry(name: str) -> CatalogEntry:
    """The entry of one of `model_names`; parameters are not counted yet, unless free."""
    if name in OWN_MODELS:
        return CatalogEntry(name, None, None, pretrained=False)
    if name.startswith(TORCHVISION):
        return _torchvision_entry(name)
    published = timm.get_pretrained_cfg(name)
    side = None if published is None else published.input_size[-1]
    model, _, tag = name.partition(".")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(model)] if not tag else [tag]
    if published is not None and published.tag in tags:  # what the name alone stands for
        tags = [published.tag, *(t for t in tags if t != published.tag)]
    return CatalogEntry(
        name, None, side, timm.is_model_pretrained(name), tuple(t for t in tags if t)
    )


def _torchvision_entry(name: str) -> CatalogEntry:
    all_weights: Any = torchvision.models.get_model_weights(name.removeprefix(TORCHVISION))
    published = getattr(all_weights, "DEFAULT", None)
    if published is None:
        return CatalogEntry(name, None, None, pretrained=False)
    (side,) = published.transforms().crop_size
    return CatalogEntry(name, published.meta["num_params"], side, pretrained=True)


def counted(entry: CatalogEntry) -> CatalogEntry:
    if entry.parameters is not None:
        return entry
    model = model_without_values(entry.name)
    return dataclasses.replace(entry, parameters=sum(p.numel() for p in model.parameters()))


def model_without_values(
    name: str, *, channels: int | None = None, image_size: int | None = None
) -> nn.Module:
    """A model as `model_with_values` makes it, but on the meta device.

    A constructor that reads values, as of torchvision's RegNets, gets some.
    """
    try:
        with torch.device("meta"):
            return model_with_values(name, channels=channels, image_size=image_size)
    except (InputError, NotImplementedError):
        return model_with_values(name, channels=channels, image_size=image_size)


def model_with_values(
    name: str, *, channels: int | None = None, image_size: int | None = None
) -> nn.Module:
    """A model with new weights and the published head, or one for 1000 classes.

    By default for 3 channels and the size of published weights. InputError: it does not take these.
    """
    published = None if ":" in name or name in OWN_MODELS else timm.get_pretrained_cfg(name)
    return build_model(
        name,
        num_classes=1000 if published is None else published.num_classes,
        channels=channels or 3,
        image_size=image_size or (published and published.input_size[-1]) or DEFAULT_SIZE,
    )


def made_for(name: str, model: nn.Module) -> int:
    """The side of the images, pixels, that a model made by `model_without_values` takes."""
    if name in OWN_MODELS:
        return _SMALL_SIZE
    # torchvision's ViTs are made for 224 pixels, whatever their newest weights take
    side = getattr(model, "image_size", None) or catalog_entry(name).input_size
    return side or DEFAULT_SIZE
