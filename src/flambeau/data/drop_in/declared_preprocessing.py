"""What a user says of how images become the input of a model: a dict, or the transform of an evaluation.

S: side of the model's images in pixels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
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
from flambeau.data.sources.source import PixelKind
from flambeau.data.transforms.crops import FILTERS, EvalResize, shorter_side
from flambeau.errors import InputError, nearest
from flambeau.images.pixels import MAX_CHANNELS

_KINDS: dict[str, PixelKind] = {"uint8": "uint8", "uint16": "uint16", "float32": "float"}
_SIZES = range(8, 16385)
_EXAMPLE = (
    'preprocess={"image_size": 224, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}'
)


@dataclass(frozen=True)
class Preprocessing:
    """From an image file to the input of a model.

    Attributes:
        mean, std: of each channel; their number is that of the channels. Of 8 bits they are those of pixels
            in [0, 1], as `Normalize` takes them, of others those of the numbers themselves.
        resize: what is done before the center crop of S; see `EvalResize`.
        pixels: 'uint8', levels of 8 bits; 'uint16', levels of 16; or 'float32', any numbers.
    """

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    resize: EvalResize = None
    interpolation: str = "bilinear"
    pixels: str = "uint8"

    def __post_init__(self) -> None:
        size = self.image_size
        if type(size) is not int or size not in _SIZES:
            raise InputError(
                f"preprocess: image_size must be a whole number from 8 to 16384, got {size!r:.40}"
            )
        for name in ("mean", "std"):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if len(self.mean) != len(self.std):
            raise InputError(
                f"preprocess: mean has {len(self.mean)} numbers, and std has {len(self.std)}: both have one "
                "per channel"
            )
        if min(self.std) <= 0:
            raise InputError(f"preprocess: std must be above 0, got {[*self.std]}")
        if self.interpolation not in FILTERS:
            raise InputError(
                f"preprocess: interpolation must be one of {', '.join(FILTERS)}, got "
                f"{self.interpolation!r:.40}"
            )
        if self.pixels not in _KINDS:
            raise InputError(
                f"preprocess: pixels must be one of {', '.join(_KINDS)}, got {self.pixels!r:.40}"
            )
        self._check_resize()

    def _check_resize(self) -> None:
        rule = self.resize
        if rule is None or rule == "squash":
            return
        if type(rule) is not int or not self.image_size <= rule <= _SIZES[-1]:
            raise InputError(
                "preprocess: resize is the length of the shorter side before the center crop, from "
                f'image_size = {self.image_size} on, or "squash" for both sides to image_size; got '
                f"{rule!r:.40}"
            )

    @classmethod
    def of(cls, given: "Mapping[str, Any] | Callable[..., Any]") -> "Preprocessing":
        """What a user has given: a dict of the attributes, or torchvision's or timm's transform of an
        evaluation.

        InputError: a value out of range, or a transform that this cannot express.
        """
        if isinstance(given, Preprocessing):
            return given
        if not isinstance(given, Mapping):
            # torchvision takes a second of every start, and few give a transform.

            given = table_of_transform(given, example=_EXAMPLE)
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise InputError(
                    f"preprocess has no key {name!r}{nearest(str(name), names)}; it takes {', '.join(names)}"
                )
        for name in names[:3]:
            if name not in given:
                raise InputError(f"preprocess says no {name}; such as {_EXAMPLE}")
        return cls(**{str(name): value for name, value in given.items() if value is not None})

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def kind(self) -> PixelKind:
        return _KINDS[self.pixels]

    def as_table(self) -> dict[str, Any]:
        """As config.toml holds it; `of` takes it back."""
        table: dict[str, Any] = {
            "image_size": self.image_size,
            "interpolation": self.interpolation,
            "mean": [*self.mean],
            "std": [*self.std],
        }
        if self.pixels != "uint8":
            table["pixels"] = self.pixels
        return table if self.resize is None else {**table, "resize": self.resize}

    def __str__(self) -> str:
        side = self.image_size
        if self.resize == "squash":
            return f"both sides resized to {side}"
        shorter = shorter_side(side, self.resize)
        return f"the shorter side resized to {shorter}, the center {side} x {side}"


def _numbers(name: str, given: Any) -> tuple[float, ...]:
    if isinstance(given, torch.Tensor):
        given = given.flatten().tolist()
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    is_right = is_list and all(
        isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one)
        for one in given
    )
    if not is_right or not 1 <= len(given) <= MAX_CHANNELS:
        raise InputError(
            f"preprocess: {name} must be a list of 1 to {MAX_CHANNELS} numbers, one per channel, got "
            f"{given!r:.80}"
        )
    return tuple(map(float, given))


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
