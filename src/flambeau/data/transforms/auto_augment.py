"""RandAugment and TrivialAugment: operations drawn at random from a fixed list.

Source: Cubuk et al., "RandAugment: practical automated data augmentation with a reduced search space",
NeurIPS 2020 (arXiv:1909.13719); Müller and Hutter, "TrivialAugment: tuning-free yet state-of-the-art data
augmentation", ICCV 2021, the wide space (arXiv:2103.10158). Operations, magnitudes and signs are those of
torchvision's RandAugment and TrivialAugmentWide, with nearest neighbour and black fill.

Levels of 16 bits, as float32, get the operations that need no level of white, which is unknown there: 12 bits
in files of 16. Floating-point pixels of any unit, and images of channels that are no color, get SHAPES.

The draws depend on the sample's seed alone. Not for data whose label depends on colors or directions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from flambeau.data.transforms import color, shape
from flambeau.data.transforms.color import color_jitter, uniform
from flambeau.images.pixels import Pixels

# Numbers of the random streams: three for TrivialAugment, and two per operation of RandAugment.
_TRIVIAL, _RAND = 1100, 2000


class Operation(NamedTuple):
    """An operation and its magnitude.

    Attributes:
        magnitude: in its unit: pixels (translation), degrees (rotation), pixels per pixel (shear), bits
            (posterize), share of 255 (solarize), difference of the factor from 1 (brightness, color,
            contrast, sharpness); 0.0 for operations without one.
    """

    name: str
    magnitude: float


_Apply = Callable[[Pixels, float], Pixels]

OPERATIONS: MappingProxyType[str, _Apply] = MappingProxyType(
    {
        "Identity": lambda pixels, _: np.ascontiguousarray(pixels),
        "ShearX": shape.shear_x,
        "ShearY": shape.shear_y,
        "TranslateX": lambda pixels, pixels_right: shape.translate_x(pixels, int(pixels_right)),
        "TranslateY": lambda pixels, pixels_down: shape.translate_y(pixels, int(pixels_down)),
        "Rotate": shape.rotate,
        "Brightness": lambda pixels, change: color.adjust_brightness(pixels, 1.0 + change),
        "Color": lambda pixels, change: color.adjust_saturation(pixels, 1.0 + change),
        "Contrast": lambda pixels, change: color.adjust_contrast(pixels, 1.0 + change),
        "Sharpness": lambda pixels, change: color.adjust_sharpness(pixels, 1.0 + change),
        "Posterize": lambda pixels, bits: color.posterize(pixels, int(bits)),
        "Solarize": lambda pixels, share: color.solarize(pixels, 255.0 * share),
        "AutoContrast": lambda pixels, _: color.autocontrast(pixels),
        "Equalize": lambda pixels, _: color.equalize(pixels),
    }
)
"""By torchvision's names and in its order."""

NEED_WHITE = ("Posterize", "Solarize", "AutoContrast", "Equalize")
"""What images of 16 bits are not changed by."""
SHAPES = ("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate")
"""What moves pixels and changes none: for those of an unknown unit, and for channels that are no color."""
_NAMES = tuple(OPERATIONS)
_NAMES_OF_16_BITS = tuple(name for name in _NAMES if name not in NEED_WHITE)
_WITH_INVERT: dict[str, _Apply] = {
    **OPERATIONS,
    "Invert": lambda pixels, _: color.invert(pixels),  # only AutoAugment has it
}
_WITHOUT_MAGNITUDE = ("Identity", "AutoContrast", "Equalize")
_WITHOUT_SIGN = ("Posterize", "Solarize")

# Largest magnitudes; for Posterize the number of bits that the largest one removes.
_RAND_LARGEST = {"Shear": 0.3, "Rotate": 30.0, "Posterize": 4, "Blend": 0.9}
_WIDE_LARGEST = {"Shear": 0.99, "Translate": 32.0, "Rotate": 135.0, "Posterize": 6, "Blend": 0.99}


def rand_augment(
    pixels: Pixels,
    seed: int,
    *,
    num_ops: int = 2,
    magnitude: int = 9,
    num_magnitude_bins: int = 31,
    names: Sequence[str] | None = None,
) -> Pixels:
    """Several random operations, one after the other, all with the same magnitude.

    Args:
        magnitude: from 0, which changes nothing or little, to num_magnitude_bins - 1.
        names: of operations to draw from; None: all for such pixels.
    """
    height, width = pixels.shape[:2]
    drawn = draw_rand_augment(
        height,
        width,
        seed,
        num_ops=num_ops,
        magnitude=magnitude,
        num_magnitude_bins=num_magnitude_bins,
        names=names or _names_for(pixels),
    )
    return apply_operations(pixels, drawn)


def trivial_augment_wide(
    pixels: Pixels, seed: int, *, names: Sequence[str] | None = None
) -> Pixels:
    """One random operation with a random magnitude; `names` as of `rand_augment`."""
    drawn = draw_trivial_augment_wide(seed, names=names or _names_for(pixels))
    return apply_operations(pixels, [drawn])


def draw_rand_augment(
    height: int,
    width: int,
    seed: int,
    *,
    num_ops: int = 2,
    magnitude: int = 9,
    num_magnitude_bins: int = 31,
    names: Sequence[str] = _NAMES,
) -> list[Operation]:
    """The operations of `rand_augment` for an image of this size."""
    if num_ops < 0:
        raise ValueError(f"num_ops must be at least 0, got {num_ops}")
    if num_magnitude_bins < 2:
        raise ValueError(f"num_magnitude_bins must be at least 2, got {num_magnitude_bins}")
    if not 0 <= magnitude < num_magnitude_bins:
        raise ValueError(f"magnitude must be in 0 .. {num_magnitude_bins - 1}, got {magnitude}")
    share = 150 / 331  # of the side, in AutoAugment's images of 331 x 331
    largest = {**_RAND_LARGEST, "TranslateX": share * width, "TranslateY": share * height}
    return [
        _signed(
            _name(seed, draw, names),
            magnitude,
            num_magnitude_bins,
            largest,
            uniform(seed, draw + 1),
        )
        for draw in range(_RAND, _RAND + 2 * num_ops, 2)
    ]


def draw_trivial_augment_wide(seed: int, *, names: Sequence[str] = _NAMES) -> Operation:
    """The operation of `trivial_augment_wide`."""
    num_bins = 31
    bin_ = int(uniform(seed, _TRIVIAL + 1) * num_bins)
    sign = uniform(seed, _TRIVIAL + 2)
    return _signed(_name(seed, _TRIVIAL, names), bin_, num_bins, _WIDE_LARGEST, sign)


def apply_operations(pixels: Pixels, operations: list[Operation]) -> Pixels:
    """Applies operations in their order to (H, W, C), C 1 or 3, or any with SHAPES; a contiguous result."""
    for name, magnitude in operations:
        pixels = _WITH_INVERT[name](pixels, magnitude)
    return np.ascontiguousarray(pixels)


def _names_for(pixels: Pixels) -> Sequence[str]:
    return _NAMES_OF_16_BITS if pixels.dtype == np.float32 else _NAMES


def _name(seed: int, draw: int, names: Sequence[str]) -> str:
    return names[int(uniform(seed, draw) * len(names))]


def _signed(name: str, bin_: int, num_bins: int, largest: dict[str, Any], sign: float) -> Operation:
    if name in _WITHOUT_MAGNITUDE:
        return Operation(name, 0.0)
    if name == "Posterize":
        return Operation(name, float(round(8 - bin_ / ((num_bins - 1) / largest[name]))))
    if name == "Solarize":
        return Operation(name, _step(1.0, 0.0, bin_, num_bins))
    group = name if name in largest else name.rstrip("XY")
    magnitude = _step(0.0, largest.get(group, largest["Blend"]), bin_, num_bins)
    return Operation(name, -magnitude if sign < 0.5 else magnitude)


def _step(start: float, stop: float, bin_: int, num_bins: int) -> float:
    # In float32, as in torchvision: a translation by 15.999999 pixels is one by 15.
    return float(torch.linspace(start, stop, num_bins)[bin_])


@dataclass(frozen=True)
class Augmentation:
    """Color jitter, then a policy of random operations; a function of the pixels and the sample's seed.

    Args:
        policy: 'none', 'randaugment' or 'trivialaugment', with torchvision's default magnitudes.
        moves_only: the policy draws from SHAPES alone.
    """

    policy: str = "none"
    jitter: float = 0.0
    moves_only: bool = False

    def __call__(self, pixels: Pixels, seed: int) -> Pixels:
        """(H, W, C) uint8, or levels of 16 bits, to the same; only the low 64 bits of the seed are used."""
        if self.jitter:
            pixels = color_jitter(
                pixels, seed, brightness=self.jitter, contrast=self.jitter, saturation=self.jitter
            )
        names = SHAPES if self.moves_only else None
        if self.policy == "randaugment":
            return rand_augment(pixels, seed, names=names)
        if self.policy == "trivialaugment":
            return trivial_augment_wide(pixels, seed, names=names)
        return pixels

    def __bool__(self) -> bool:
        return self.policy != "none" or self.jitter > 0
