"""Random crop, shift and mirror, and the crop of evaluation: pure functions of pixels and one 64-bit seed.

Source: random resized crop: Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6, with the
distribution of torchvision's RandomResizedCrop. Resizing is torch's antialiased bilinear filter on uint8, in
integer arithmetic: the same pixels with any instruction set and number of threads. Small images are shifted
and mirrored by the recipe batch_augment.

No generator, global or not, is used: random numbers are hashes of the seed, so that a sample looks the same
in any batch, worker and order of arrival.

C: channels, H: height, W: width.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flambeau.data.images.decode import Picture, Stored
from flambeau.data.images.pixels import Box, Pixels
from flambeau.data.transforms.color import uniform
from flambeau.errors import DecodeError

# Smallest and largest part of the area that a crop keeps. Published ImageNet runs of 90 epochs and more go
# down to 0.08; for the shorter runs and smaller data sets meant here, milder. Chosen, untested.
CROP_SCALE = (0.25, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)  # width over height

# How far the filters reach to each side, in pixels of the smaller of the two images.
_REACH = {"bilinear": 1, "bicubic": 2}

# Share of the shorter side that the evaluation crop keeps: 224 of 256, as in most published results.
EVAL_SHARE = 0.875

# Numbers of the random streams of a sample, 2 and 3 are batch_augment's; a crop takes four draws a try.
_FLIP, _CROP = 1, 4
_CROP_TRIES = 10  # as torchvision
_SERIAL = (
    32767  # elements of which torch makes no parallel region (at::internal::GRAIN_SIZE less one)
)


@dataclass(frozen=True)
class TrainingCrop:
    """Which part of an image a training sees, and which way round.

    Attributes:
        flip: mirror half of the images; False where left and right matter (digits, text).
        scale: smallest and largest part of the area that a random resized crop keeps, within (0, 1].
        padding: how far small images, which are not resized, are moved each way, pixels; None for an eighth
            of their side.
        interpolation: by which crops are resized, those of evaluation too: 'bilinear' or 'bicubic'.
    """

    flip: bool = True
    scale: tuple[float, float] = CROP_SCALE
    padding: int | None = None
    interpolation: str = "bilinear"

    def padding_of(self, side: int) -> int:
        """How far images of this side are moved, pixels."""
        return (
            side // 8 if self.padding is None else self.padding
        )  # 4 of 32: He et al., section 4.2


def random_resized_crop_box(
    height: int,
    width: int,
    seed: int,
    *,
    scale: tuple[float, float] = CROP_SCALE,
    ratio: tuple[float, float] = CROP_RATIO,
) -> tuple[int, int, int, int]:
    """A random box inside an image: area uniform, logarithm of the aspect ratio uniform, place uniform.

    Args:
        height: of the image, pixels.
        width: of the image, pixels.
        seed: any integer; only its low 64 bits count.
        scale: smallest and largest area of the box as a fraction of the image's, within (0, 1].
        ratio: smallest and largest width over height of the box, above 0.

    Returns:
        (top, left, height, width) in pixels. Where ten tries do not fit (a very long image), the largest
        centred box of an allowed ratio.

    Raises:
        ValueError: an empty image; scale or ratio out of range or in the wrong order.

    Example:
        >>> top, left, height, width = random_resized_crop_box(375, 500, seed=7)
        >>> 0 <= top <= 375 - height and 0 <= left <= 500 - width
        True
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
    """A random resized crop, mirrored in half of the cases.

    The crop is chosen first, and no more of the image is decoded than it needs. Of a JPEG whose crop is at
    least 2, 4 or 8 times as large as the result, the decoder is asked for that part of the size.

    Args:
        data: a whole image file, or pixels (H, W, C) uint8 or float32.
        seed: the sample's seed, any integer; only its low 64 bits count.
        size: side of the result, pixels.
        channels: 1 for grey, 3 for RGB; may be left out with pixels: then as many as they have.
        crop: how to choose it.
        out: (size, size, C) of their type, contiguous: where to write the result.

    Returns:
        (size, size, C) uint8 (float32 of float32), contiguous; the memory of `out` where that is given.

    Raises:
        DecodeError: data that cannot be decoded.

    Example:
        >>> pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
        >>> bool((train_image(pixels, 5, 2) == train_image(pixels, 5, 2)).all())
        True
    """
    picture = Picture(data)
    box = random_resized_crop_box(picture.height, picture.width, seed, scale=crop.scale)
    eighths = picture.scale_eighths_for(box[2], box[3], least=size)
    part, mirror = _scaled(box, eighths), crop.flip and uniform(seed, _FLIP) < 0.5
    if out is None:
        out = torch.empty(size, size, channels or _channels_of(data), dtype=_type_of(data))
    _check_type(data, out)
    result = out.numpy()
    cubic = crop.interpolation == "bicubic"
    if not picture.resize_part(part, result, scale_eighths=eighths, mirror=mirror, cubic=cubic):
        pixels = picture.pixels(part, channels=result.shape[2], scale_eighths=eighths)
        _resize(pixels, size, size, crop.interpolation, out=out)
        if mirror:
            _mirror(out)
    return result


def eval_image(
    data: Stored,
    size: int,
    *,
    channels: int | None = None,
    interpolation: str = "bilinear",
    out: Tensor | None = None,
) -> Pixels:
    """The shorter side resized to round(size / 0.875), then the centre; no randomness.

    An image of exactly size x size is returned as it is: it has been prepared.
    As little of the image is decoded as the centre needs.

    Args:
        data: a whole image file, or pixels (H, W, C) uint8 or float32.
        size: side of the result, pixels.
        channels: 1 for grey, 3 for RGB; may be left out with pixels: then as many as they have.
        interpolation: 'bilinear' or 'bicubic'.
        out: (size, size, C) of their type, contiguous: where to write the result.

    Returns:
        (size, size, C) uint8 (float32 of float32), contiguous; the memory of `out` where that is given.

    Raises:
        DecodeError: data that cannot be decoded.

    Example:
        >>> eval_image(np.zeros((30, 50, 3), np.uint8), 14).shape
        (14, 14, 3)
    """
    picture = Picture(data)
    channels = channels or _channels_of(data)
    if out is None:
        out = torch.empty(size, size, channels, dtype=_type_of(data))
    _check_type(data, out)
    if (picture.height, picture.width) == (size, size):
        out.numpy()[:] = picture.pixels(channels=channels)
        return out.numpy()
    # Of a very long image only the middle is resized: enlarged whole, a line of pixels would fill the memory.
    longest = 8 * min(picture.height, picture.width)
    height, width = (min(side, longest + side % 2) for side in (picture.height, picture.width))
    middle = (_centred(picture.height, height), _centred(picture.width, width), height, width)
    shorter = round(size / EVAL_SHARE)
    eighths = picture.scale_eighths_for(height, width, least=shorter)
    top, left, rows, columns = _scaled(middle, eighths)
    sides = (
        (shorter, shorter * width // height)
        if height <= width
        else (shorter * height // width, shorter)
    )
    first_row, first_column = (_centred(side, size) for side in sides)
    row, rows_used = _sources(first_row, size, rows, sides[0], interpolation)
    column, columns_used = _sources(first_column, size, columns, sides[1], interpolation)
    # What is not decoded stays undefined in here, and what it becomes is cut off below.
    canvas = np.empty((rows, columns, channels), out.numpy().dtype)
    box = (top + row, left + column, rows_used, columns_used)
    canvas[row : row + rows_used, column : column + columns_used] = picture.pixels(
        box, channels=channels, scale_eighths=eighths
    )
    resized = _resize(canvas, *sides, interpolation)
    out[:] = resized[first_row : first_row + size, first_column : first_column + size]
    return out.numpy()


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
    """Cast to 8 bits, floating-point pixels of 0 .. 1 would be black."""
    if _type_of(data) != out.dtype:
        kind = "8-bit" if out.dtype == torch.uint8 else "floating-point"
        raise DecodeError(
            f"pixels of another type than those of its source, which are {kind} by `pixel_kind`"
        )


def _scaled(box: Box, scale_eighths: int) -> Box:
    """A box in the image at this scale: each border at the nearest place."""
    top, left, height, width = box
    top, bottom, left, right = (
        (2 * at * scale_eighths + 8) // 16 for at in (top, top + height, left, left + width)
    )
    return top, left, bottom - top, right - left


def _resize(
    pixels: Pixels, height: int, width: int, interpolation: str, *, out: Tensor | None = None
) -> Tensor:
    """Resized with antialiasing, (height, width, C): F.interpolate's operators, for the sake of `out`."""
    channels = pixels.shape[2]
    # Copied unless its strides are the usual ones. Of a view whose sides of length 1 have others, which
    # count as contiguous, torch 2.15's uint8 kernel reads out of bounds: a segmentation fault.
    if pixels.strides != (pixels.shape[1] * channels, channels, 1) or not pixels.flags.writeable:
        pixels = pixels.copy()
    if out is None:
        out = torch.empty(height, width, channels, dtype=_type_of(pixels))
    source, target = _as_batch(torch.from_numpy(pixels)), _as_batch(out)
    if interpolation == "bicubic":
        torch.ops.aten._upsample_bicubic2d_aa.out(
            source, [height, width], False, None, None, out=target
        )
    else:
        torch.ops.aten._upsample_bilinear2d_aa.out(
            source, [height, width], False, None, None, out=target
        )
    return out


def _mirror(x_HWC: Tensor) -> None:
    """Mirror an image where it is; ten times faster than NumPy's copy of columns in reverse.

    In pieces so small that torch does not call for its own threads: these are for the network, and many
    decoding threads with as many helpers each would stand in each other's way.
    """
    height, width, channels = x_HWC.shape
    alone = torch.get_num_threads() == 1
    rows = height if alone else max(1, _SERIAL // (width * channels))
    for top in range(0, height, rows):
        piece = x_HWC[top : top + rows]
        piece.copy_(piece.flip(1))


def _as_batch(x_HWC: Tensor) -> Tensor:
    """(1, C, H, W) of a contiguous image, in one call: each takes microseconds after a decoder has run."""
    height, width, channels = x_HWC.shape
    return x_HWC.as_strided(
        (1, channels, height, width), (x_HWC.numel(), 1, width * channels, channels)
    )


def _centred(length: int, part: int) -> int:
    """Where a centred part begins; an odd rest is rounded to even, as torchvision's CenterCrop does it."""
    return round((length - part) / 2)


def _sources(
    first: int, count: int, length: int, resized: int, interpolation: str
) -> tuple[int, int]:
    """The part of a side that `count` positions from `first` on of the resized side are computed from."""
    step = length / resized
    around = _REACH[interpolation] * max(step, 1.0) + 1  # one more against rounding
    low = max(0, math.floor(first * step - around))
    return low, min(length, math.ceil((first + count) * step + around)) - low
