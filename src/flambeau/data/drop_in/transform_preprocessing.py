"""What the transform of an evaluation does: its resizing, crop and normalization."""

from typing import Any

import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from flambeau.data.drop_in.transform_kinds import (
    WEIGHTS_TRANSFORM,
    filter_name,
    is_from_timm,
    is_one_of,
    parts_of_weights_transform,
)
from flambeau.data.transforms.crops import FILTERS, EvalResize
from flambeau.errors import InputError


def table_of_transform(transform: Any, *, example: str) -> dict[str, Any]:
    """What a transform of torchvision or timm does, as the fields of `Preprocessing`; InputError if it is of
    no usual kind.

    `example`: what a user can say instead, for the error.
    """
    try:
        return _table(transform)
    except _Unknown as error:
        raise InputError(
            f"preprocess: this transform cannot be recorded: {error}\n"
            "Give that of an evaluation, such as Compose([Resize(256), CenterCrop(224), ToTensor(), "
            f"Normalize(mean, std)]), or say it yourself: {example}"
        ) from None


class _Unknown(ValueError):
    pass


def _table(transform: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one in _flat(transform):
        _note(one, found)
    crop, resize = found.get("crop"), found.get("resize")
    if crop is None and resize is None:
        raise _Unknown(
            "it has neither Resize nor CenterCrop, which say the size of the model's images"
        )
    if resize is None:
        raise _Unknown("it crops the center of images that are not resized")
    rule: EvalResize = "squash"
    if isinstance(resize, int):
        rule = resize
        crop = resize if crop is None else crop
        if resize < crop:
            raise _Unknown(f"Resize({resize}) before CenterCrop({crop}) leaves black borders")
    else:
        if resize[0] != resize[1] or crop not in (None, resize[0]):
            raise _Unknown(f"Resize({resize}) gives another shape than a square of the final size")
        crop = resize[0]
    if "floats" not in found:
        raise _Unknown("it makes no floating-point numbers from 0 to 1, as ToTensor does")
    mean, std = found.get("normalize", ([0.0] * 3, [1.0] * 3))
    if found.get("grey") and len(mean) != 1:
        if "normalize" in found:
            raise _Unknown("it makes images grey, and its Normalize has several channels")
        mean, std = mean[:1], std[:1]
    return {
        "image_size": crop,
        "mean": mean,
        "std": std,
        "resize": rule,
        "interpolation": found.get("filter", "bilinear"),
    }


def _flat(transform: Any) -> list[Any]:
    if is_one_of(transform, WEIGHTS_TRANSFORM):
        return parts_of_weights_transform(transform)
    if is_one_of(transform, v1.Compose, v2.Compose):
        return [one for part in transform.transforms for one in _flat(part)]
    return [transform]


def _note(one: Any, found: dict[str, Any]) -> None:
    """Add what one transform does; _Unknown: it is unknown, or in an unusual place."""
    name = type(one).__name__
    if is_one_of(one, v1.Resize, v2.Resize) and not {"resize", "crop", "floats"} & found.keys():
        filter_ = filter_name(one.interpolation)
        if filter_ not in FILTERS or one.antialias is False or one.max_size is not None:
            raise _Unknown(
                "its Resize is not an antialiased bilinear or bicubic one without max_size"
            )
        size = list(one.size) if isinstance(one.size, tuple | list) else [one.size]
        found |= {"resize": size[0] if len(size) == 1 else tuple(size), "filter": filter_}
    elif is_one_of(one, v1.CenterCrop, v2.CenterCrop) and not {"crop", "floats"} & found.keys():
        height, width = one.size
        if height != width:
            raise _Unknown(f"CenterCrop({(height, width)}) is no square")
        found["crop"] = height
    elif is_one_of(one, v1.ToTensor) or is_from_timm(one, "MaybeToTensor"):
        found["floats"] = True
    elif is_one_of(one, v1.ConvertImageDtype, v2.ConvertImageDtype, v2.ToDtype):
        scales = getattr(one, "scale", True)
        if one.dtype != torch.float32 or not scales:
            raise _Unknown(f"its {name} does not make float32 from 0 to 1")
        found["floats"] = True
    elif is_one_of(one, v1.Normalize, v2.Normalize) and "floats" in found:
        if "normalize" in found:
            raise _Unknown("it normalizes twice")
        found["normalize"] = [*map(float, one.mean)], [*map(float, one.std)]
    elif is_one_of(one, v1.Grayscale, v2.Grayscale) and one.num_output_channels == 1:
        found["grey"] = True
    elif not is_one_of(one, v1.PILToTensor, v2.PILToTensor, v2.ToImage, v2.ToPureTensor, v2.RGB):
        raise _Unknown(f"{name} is none of Resize, CenterCrop, ToTensor, Normalize, in this order")
