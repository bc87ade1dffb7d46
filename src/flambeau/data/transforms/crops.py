"""Random crop, shift and mirror, and the evaluation crop: pure functions of pixels and one 64-bit seed.

Source: random resized crop: Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6, with the
distribution of torchvision's RandomResizedCrop. Resizing is torch's antialiased bilinear filter on uint8, in
integer arithmetic: the same pixels with any instruction set and number of threads. Small images are shifted
and mirrored by the recipe batch_crop_flip.

No generator is used: random numbers are hashes of the seed, so that a sample looks the same in any batch and
worker.

C: channels, H: height, W: width.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from flambeau.data.transforms.color import uniform
from flambeau.data.transforms.resizing import fill_part, scaled_box, window_of_part
from flambeau.errors import DecodeError
from flambeau.images.decode import Picture, Stored
from flambeau.images.pixels import Pixels

# Smallest and largest share of the area that a crop keeps. Published ImageNet runs of 90 epochs and more go
# down to 0.08; this is milder, for shorter runs and smaller data sets. Chosen, untested.
CROP_SCALE = (0.25, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)  # width over height

# Share of the shorter side that the evaluation crop keeps: 224 of 256, as in most published results.
EVAL_SHARE = 0.875

FILTERS = ("bilinear", "bicubic")
"""The interpolations of resizing."""
EvalResize: TypeAlias = int | Literal["squash"] | None
"""To what an evaluation resizes before its center crop: the shorter side to this many pixels, or, 'squash',
both sides to the size of the crop; None: the shorter side to the size / 0.875."""

# Numbers of the random streams of a sample; 2 and 3 are batch_crop_flip's. A crop takes four draws per try.
_FLIP, _CROP = 1, 4
_CROP_TRIES = 10  # as in torchvision


@dataclass(frozen=True)
class TrainingCrop:
    """How training images are cropped and mirrored.

    Attributes:
        flip: mirror half of the images; False if left and right matter (digits, text). 'alternate' mirrors
            those whose seed is negative (`alternating_seeds`).
        scale: range of the area that a random resized crop keeps, within (0, 1].
        padding: shift of small images, which are not resized, in pixels; None for an eighth of their side.
    """

    flip: bool | Literal["alternate"] = True
    scale: tuple[float, float] = CROP_SCALE
    padding: int | None = None
    interpolation: str = "bilinear"
    eval_resize: EvalResize = None

    def mirrors(self, seed: int) -> bool:
        """Whether the image of this seed is mirrored."""
        if self.flip == "alternate":
            return seed < 0
        return self.flip and uniform(seed, _FLIP) < 0.5

    def box(self, height: int, width: int, seed: int) -> tuple[int, int, int, int]:
        """The part (top, left, height, width) of an image that is shown, in pixels.

        The whole image where no crop is smaller and an evaluation shows it whole, too.
        """
        if self.scale[0] == 1 and self.eval_resize == "squash":
            return 0, 0, height, width
        return random_resized_crop_box(height, width, seed, scale=self.scale)

    def padding_of(self, side: int) -> int:
        """How far images of this side are shifted, pixels."""
        # 4 of 32: He et al., section 4.2
        return side // 8 if self.padding is None else self.padding


def random_resized_crop_box(
    height: int,
    width: int,
    seed: int,
    *,
    scale: tuple[float, float] = CROP_SCALE,
    ratio: tuple[float, float] = CROP_RATIO,
) -> tuple[int, int, int, int]:
    """A random box (top, left, height, width): uniform area, uniform logarithm of the aspect ratio, uniform
    position.

    `scale` is the range of its share of the area. If ten tries do not fit (a very long image), the largest
    centred box of an allowed ratio.
    """
    if height < 1 or width < 1:
        raise ValueError(f"the image must have a pixel, got height {height} and width {width}")
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"scale must be (low, high) with 0 < low <= high <= 1, got {scale}")
    if not 0 < ratio[0] <= ratio[1]:
        raise ValueError(f"ratio must be (low, high) with 0 < low <= high, got {ratio}")
    for draw in range(_CROP, _CROP + 4 * _CROP_TRIES, 4):
        area = height * width * _between(scale[0], scale[1], uniform(seed, draw))
        shape = math.exp(_between(math.log(ratio[0]), math.log(ratio[1]), uniform(seed, draw + 1)))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            top = int(uniform(seed, draw + 2) * (height - h + 1))
            return top, int(uniform(seed, draw + 3) * (width - w + 1)), h, w
    shape = min(max(width / height, ratio[0]), ratio[1])
    h, w = min(height, round(width / shape)), min(width, round(height * shape))
    return (height - h) // 2, (width - w) // 2, max(h, 1), max(w, 1)


def train_image(
    data: Stored,
    seed: int,
    size: int,
    *,
    channels: int | None = None,
    crop: TrainingCrop = TrainingCrop(),
    out: Tensor | None = None,
) -> Pixels:
    """A random resized crop, mirrored with a probability of one half.

    Only the part that the crop needs is decoded: a JPEG whose crop is at least 2, 4 or 8 times as large as
    the result at that fraction of its size.

    Args:
        data: a whole image file, or pixels (H, W, C) uint8 or float32.
        channels: 1 for grey, 3 for RGB; None, with pixels only, keeps theirs.

    Returns:
        (size, size, C) uint8 (float32 of float32), contiguous; `out` if that is given.
    """
    picture = Picture(data)
    box = crop.box(picture.height, picture.width, seed)
    mirror = crop.mirrors(seed)
    if out is None:
        out = torch.empty(size, size, channels or _channels_of(data), dtype=_type_of(data))
    _check_type(data, out)
    fill_part(picture, box, crop.interpolation, mirror=mirror, out=out)
    return out.numpy()


def eval_image(
    data: Stored,
    size: int,
    *,
    channels: int | None = None,
    interpolation: str = "bilinear",
    resize: EvalResize = None,
    out: Tensor | None = None,
) -> Pixels:
    """The shorter side resized to round(size / 0.875), then a center crop; arguments as in `train_image`.

    An image of exactly size x size is returned unchanged. Only what the crop needs is decoded.

    Args:
        resize: another rule; see `EvalResize`.
    """
    picture = Picture(data)
    channels = channels or _channels_of(data)
    if out is None:
        out = torch.empty(size, size, channels, dtype=_type_of(data))
    _check_type(data, out)
    if (picture.height, picture.width) == (size, size):
        out.numpy()[:] = picture.pixels(channels=channels)
        return out.numpy()
    height, width = picture.height, picture.width
    if resize != "squash":
        # Only the middle of a very long image is resized: resized whole, one line could fill the memory.
        longest = 8 * min(height, width)
        height, width = (min(side, longest + side % 2) for side in (height, width))
    middle = (_centred(picture.height, height), _centred(picture.width, width), height, width)
    shorter = shorter_side(size, resize)
    eighths = picture.scale_eighths_for(height, width, least=shorter)
    top, left, rows, columns = scaled_box(middle, eighths)
    scale = min(height, width)
    sides = shorter * height // scale, shorter * width // scale
    if resize == "squash":
        sides = size, size
    first_row, first_column = (_centred(side, size) for side in sides)
    window = first_row, first_column, size, size
    out[:] = window_of_part(
        picture,
        (top, left, rows, columns),
        sides,
        window,
        eighths,
        interpolation,
        channels=channels,
        dtype=out.dtype,
    )
    return out.numpy()


def shorter_side(size: int, resize: EvalResize) -> int:
    """To how many pixels an evaluation resizes the shorter side."""
    if resize == "squash":
        return size
    return round(size / EVAL_SHARE) if resize is None else resize


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def _channels_of(data: Stored) -> int:
    if isinstance(data, bytes):
        raise ValueError("channels must be given with an encoded image")
    return data.shape[2] if data.ndim == 3 else 1


def _type_of(data: Stored) -> torch.dtype:
    is_float = not isinstance(data, bytes) and data.dtype == np.float32
    return torch.float32 if is_float else torch.uint8


def _check_type(data: Stored, out: Tensor) -> None:
    """DecodeError for other types: floating-point pixels of 0 .. 1 cast to 8 bits would be black."""
    if _type_of(data) != out.dtype:
        kind = "8-bit" if out.dtype == torch.uint8 else "floating-point"
        raise DecodeError(
            f"pixels of another type than those of its source, which are {kind} by `pixel_kind`"
        )


def _centred(length: int, part: int) -> int:
    """The start of a centred part; odd rests are rounded to even, as in torchvision's CenterCrop."""
    return round((length - part) / 2)
