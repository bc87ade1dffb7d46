"""What a user says of how images become the input of a model: a dict, or the transform of an evaluation.

S: side of the model's images in pixels.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

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
        image_size: S.
        mean, std: of each channel; of 8 bits those of pixels in [0, 1], as `Normalize` takes them, else those
            of the numbers themselves.
        resize: before the center crop of S; see `EvalResize`.
        interpolation: 'bilinear' or 'bicubic'.
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
        """From a dict of the attributes, or torchvision's or timm's transform of an evaluation.

        InputError: a value out of range, or a transform beyond this.
        """
        if isinstance(given, Preprocessing):
            return given
        if not isinstance(given, Mapping):
            # torchvision takes a second of every start, and few give a transform.
            from flambeau.data.drop_in.transform_preprocessing import table_of_transform

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
