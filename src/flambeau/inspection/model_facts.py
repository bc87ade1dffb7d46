"""What is known of a model by its name, without its weights: of timm, torchvision and our own."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torchvision.models
from torch import nn

from flambeau.errors import InputError
from flambeau.trainer.parts.model import SMALL, TINY, build_model

TORCHVISION = "torchvision:"
DEFAULT_SIZE = 224  # pixels, where a model was published for none
_SMALL_SIZE = 32  # pixels, for our own small models


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model without its weights.

    Attributes:
        name: as --model takes it.
        parameters: with the published head, or 1000 classes; None where they are not counted.
        input_size: side of the images of its published weights; None where any will do.
        pretrained: whether published weights exist.
        tags: those of timm's published weights; the first is what --pretrained takes.
    """

    name: str
    parameters: int | None
    input_size: int | None
    pretrained: bool
    tags: tuple[str, ...] = ()


def model_names(*, tags: bool) -> list[str]:
    """All that --model takes but FILE.py:FUNCTION.

    Args:
        tags: a name for each set of published weights of timm's, NAME.TAG.
    """
    names = timm.list_models()
    if tags:
        published = timm.list_pretrained()
        with_tags = {name.partition(".")[0] for name in published}
        names = [name for name in names if name not in with_tags] + published
    known = torchvision.models.list_models(module=torchvision.models)  # classifiers
    return [SMALL, TINY, *sorted(names), *sorted(f"{TORCHVISION}{name}" for name in known)]


def model_facts(name: str) -> ModelFacts:
    """Of one of `model_names`; the parameters only where they are known without a count."""
    if name in (SMALL, TINY):
        return ModelFacts(name, None, None, pretrained=False)
    if name.startswith(TORCHVISION):
        return _of_torchvision(name)
    published = timm.get_pretrained_cfg(name)
    side = None if published is None else published.input_size[-1]
    model, _, tag = name.partition(".")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(model)] if not tag else [tag]
    if published is not None and published.tag in tags:  # what the name alone stands for
        tags = [published.tag, *(t for t in tags if t != published.tag)]
    return ModelFacts(name, None, side, timm.is_model_pretrained(name), tuple(t for t in tags if t))


def _of_torchvision(name: str) -> ModelFacts:
    """Its published weights say how many parameters there are."""
    all_weights: Any = torchvision.models.get_model_weights(name.removeprefix(TORCHVISION))
    published = getattr(all_weights, "DEFAULT", None)
    if published is None:
        return ModelFacts(name, None, None, pretrained=False)
    (side,) = published.transforms().crop_size
    return ModelFacts(name, published.meta["num_params"], side, pretrained=True)


def counted(facts: ModelFacts) -> ModelFacts:
    """With the parameters."""
    if facts.parameters is not None:
        return facts
    model = model_without_values(facts.name)
    return dataclasses.replace(facts, parameters=sum(p.numel() for p in model.parameters()))


def model_without_values(
    name: str, *, channels: int | None = None, image_size: int | None = None
) -> nn.Module:
    """A model as `model_with_values` makes it, but on the meta device.

    With values where its constructor reads some, as torchvision's RegNets do.

    Args:
        name: one of `model_names`.
        channels: of its input; None for 3.
        image_size: side of its input, pixels; None for what it is published for.

    Raises:
        InputError: it cannot be made so.
    """
    try:
        with torch.device("meta"):
            return model_with_values(name, channels=channels, image_size=image_size)
    except (InputError, NotImplementedError):
        return model_with_values(name, channels=channels, image_size=image_size)


def model_with_values(
    name: str, *, channels: int | None = None, image_size: int | None = None
) -> nn.Module:
    """A model with new weights and the head of its published ones, or one for 1000 classes.

    Args:
        name: one of `model_names`.
        channels: of its input; None for 3.
        image_size: side of its input, pixels; None for what it is published for.

    Raises:
        InputError: it cannot be made so.
    """
    published = None if ":" in name or name in (SMALL, TINY) else timm.get_pretrained_cfg(name)
    return build_model(
        name,
        num_classes=1000 if published is None else published.num_classes,
        channels=channels or 3,
        image_size=image_size or (published and published.input_size[-1]) or DEFAULT_SIZE,
    )


def made_for(name: str, model: nn.Module) -> int:
    """Side of the images, pixels, that one of `model_names` takes as `model_without_values` makes it."""
    if name in (SMALL, TINY):
        return _SMALL_SIZE
    # torchvision's ViTs are made for 224 pixels, whatever their newest weights take
    side = getattr(model, "image_size", None) or model_facts(name).input_size
    return side or DEFAULT_SIZE
