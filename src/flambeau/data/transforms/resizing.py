"""A part of a picture in another size: torch's antialiased filters on uint8, from no more than is decoded.

Integer arithmetic: the same pixels with any instruction set and number of threads, by the C kernel or torch.

H: height, W: width, C: channels.
"""

import math

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flambeau.images.channels import to_image
from flambeau.images.decode import Picture
from flambeau.images.native import kernel as native
from flambeau.images.pixels import Box, Pixels

# How far the filters reach to each side, in pixels of the smaller of the two images.
_REACH = {"bilinear": 1, "bicubic": 2}

# Elements of which torch makes no parallel region (at::internal::GRAIN_SIZE less one)
_SERIAL = 32767


def resized_part(
    picture: Picture,
    box: Box,
    size: tuple[int, int],
    *,
    channels: int,
    interpolation: str = "bilinear",
    mirror: bool = False,
) -> Pixels:
    """A part of a picture in another size, as sharp as PIL or torch make it.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size only where that leaves three times the sides of the
    result: where it leaves no more than the result, that is softer by 4 to 7 % (mean second differences of
    photographs, at 128 and 64 pixels), and of photographs of 500 x 375 hardly any time is saved.

    Args:
        picture: of 8 bits.
        box: top, left, height and width of the part.
        size: height and width of the result.
        channels: 1 for grey, 3 for RGB.
        interpolation: 'bilinear' or 'bicubic', with antialiasing.
        mirror: the columns run backwards.

    Returns:
        (*size, channels) uint8, contiguous.

    Raises:
        DecodeError: data that cannot be decoded.
    """
    out = torch.empty(*size, channels, dtype=torch.uint8)
    fill_part(picture, box, interpolation, mirror=mirror, out=out, least_share=3)
    return out.numpy()


def resized_window(
    picture: Picture,
    sides: tuple[int, int],
    window: Box,
    *,
    channels: int,
    interpolation: str = "bilinear",
    pillows: bool = False,
) -> Pixels:
    """A part of a resized picture, of which no more is decoded than that part needs.

    Args:
        picture: of 8 bits.
        sides: height and width that the whole of it is resized to.
        window: top, left, height and width of the part, within these.
        channels: 1 for grey, 3 for RGB.
        interpolation: 'bilinear' or 'bicubic', with antialiasing.
        pillows: the pixels of `PIL.Image.resize`, which rounds otherwise than torch.

    Returns:
        (height, width, channels) uint8.

    Raises:
        DecodeError: data that cannot be decoded.
    """
    every = 0, 0, picture.height, picture.width
    return window_of_part(
        picture,
        every,
        sides,
        window,
        8,
        interpolation,
        channels=channels,
        dtype=torch.uint8,
        pillows=pillows,
    ).numpy()


def fill_part(
    picture: Picture,
    box: Box,
    interpolation: str,
    *,
    mirror: bool,
    out: Tensor,
    least_share: int = 1,
) -> None:
    """Fill `out`, (H, W, C), contiguous; of a JPEG at a scale that leaves `least_share` times its sides."""
    height, width, channels = out.shape
    eighths = max(
        picture.scale_eighths_for(box[2], box[2], least=least_share * height),
        picture.scale_eighths_for(box[3], box[3], least=least_share * width),
    )
    part = scaled_box(box, eighths)
    cubic = interpolation == "bicubic"
    if picture.resize_part(part, out.numpy(), scale_eighths=eighths, mirror=mirror, cubic=cubic):
        return
    pixels = picture.pixels(part, channels=channels, scale_eighths=eighths)
    _resize(pixels, height, width, interpolation, out=out)
    if mirror:
        _mirror(out)


def window_of_part(
    picture: Picture,
    part: Box,
    sides: tuple[int, int],
    window: Box,
    eighths: int,
    interpolation: str,
    *,
    channels: int,
    dtype: torch.dtype,
    pillows: bool = False,
) -> Tensor:
    """Of a part of the picture at a scale, resized to `sides`, the window."""
    top, left, rows, columns = part
    first_row, first_column, height, width = window
    row, rows_used = _sources(first_row, height, rows, sides[0], interpolation)
    column, columns_used = _sources(first_column, width, columns, sides[1], interpolation)
    # What is not decoded stays undefined in here, and what it becomes is cut off below.
    canvas = np.empty((rows, columns, channels), torch.empty(0, dtype=dtype).numpy().dtype)
    box = (top + row, left + column, rows_used, columns_used)
    canvas[row : row + rows_used, column : column + columns_used] = picture.pixels(
        box, channels=channels, scale_eighths=eighths
    )
    resized = _resize(canvas, *sides, interpolation, pillows=pillows)
    return resized[first_row : first_row + height, first_column : first_column + width]


def scaled_box(box: Box, scale_eighths: int) -> Box:
    """A box in the image at this scale: each border at the nearest place."""
    top, left, height, width = box
    top, bottom, left, right = (
        (2 * at * scale_eighths + 8) // 16 for at in (top, top + height, left, left + width)
    )
    return top, left, bottom - top, right - left


def _resize(
    pixels: Pixels,
    height: int,
    width: int,
    interpolation: str,
    *,
    out: Tensor | None = None,
    pillows: bool = False,
) -> Tensor:
    """Resized with antialiasing, (height, width, C): by the kernel, torch or Pillow."""
    channels = pixels.shape[2]
    cubic = interpolation == "bicubic"
    # Copied unless its strides are the usual ones. Of a view whose sides of length 1 have others, which
    # count as contiguous, torch 2.15's uint8 kernel reads out of bounds: a segmentation fault.
    if pixels.strides != (pixels.shape[1] * channels, channels, 1) or not pixels.flags.writeable:
        pixels = pixels.copy()
    source = torch.from_numpy(pixels)
    if out is None:
        out = torch.empty(height, width, channels, dtype=source.dtype)
    kernel = native.kernel()
    rows_first = not pillows or _pillow_begins_with_rows(pixels, height, width)
    if kernel is not None and kernel.uses_avx2 and pixels.dtype == np.uint8 and rows_first:
        kernel.resize(pixels, out.numpy(), mirror=False, cubic=cubic, pillows=pillows)
        return out
    if pillows:
        filter_ = Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR
        resized = np.asarray(to_image(pixels).resize((width, height), filter_))
        out.numpy()[:] = resized.reshape(height, width, channels)
        return out
    batch, target = _as_batch(source), _as_batch(out)
    if cubic:
        torch.ops.aten._upsample_bicubic2d_aa.out(
            batch, [height, width], False, None, None, out=target
        )
    else:
        torch.ops.aten._upsample_bilinear2d_aa.out(
            batch, [height, width], False, None, None, out=target
        )
    return out


def _pillow_begins_with_rows(pixels: Pixels, height: int, width: int) -> bool:
    """In every version, as the kernel does; else Pillow 13 begins with the columns, and others may not."""
    less_height = pixels.shape[0] - height
    less_width = pixels.shape[1] - width
    return bool(less_height <= max(0, 2 * less_width))


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


def _sources(
    first: int, count: int, length: int, resized: int, interpolation: str
) -> tuple[int, int]:
    """The part of a side that `count` positions from `first` on of the resized side are computed from."""
    step = length / resized
    around = _REACH[interpolation] * max(step, 1.0) + 1  # one more against rounding
    low = max(0, math.floor(first * step - around))
    return low, min(length, math.ceil((first + count) * step + around)) - low
