"""Resizes parts of a picture with torch's antialiased filters on uint8, and decodes only what is needed.

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

# How far the filters reach to each side, in pixels of the smaller image.
_REACH = {"bilinear": 1, "bicubic": 2}

# Up to this number of elements torch starts no parallel region (at::internal::GRAIN_SIZE less one).
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
    """A part of an 8-bit picture in another size (height, width), as sharp as PIL or torch make it.

    A JPEG is decoded at 1/2, 1/4 or 1/8 of its size only if that leaves three times the sides of the result:
    less is softer by 4 to 7 % (mean second differences of photographs, at 128 and 64 pixels).
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
    like_pillow: bool = False,
) -> Pixels:
    """A window (top, left, height, width) of a picture resized to `sides`; only what that needs is decoded.

    `like_pillow`: the pixels of `PIL.Image.resize`, which rounds differently than torch.
    """
    whole = 0, 0, picture.height, picture.width
    return window_of_part(
        picture,
        whole,
        sides,
        window,
        8,
        interpolation,
        channels=channels,
        dtype=torch.uint8,
        like_pillow=like_pillow,
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
    """Fill `out`, (H, W, C), contiguous, from a JPEG scaled to no less than `least_share` times its sides."""
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
    like_pillow: bool = False,
) -> Tensor:
    """A window of the result of resizing a part of the picture, at a scale, to `sides`."""
    top, left, rows, columns = part
    first_row, first_column, height, width = window
    row, rows_used = _sources(first_row, height, rows, sides[0], interpolation)
    column, columns_used = _sources(first_column, width, columns, sides[1], interpolation)
    # Pixels that are not decoded stay undefined here; their results are cut off below.
    canvas = np.empty((rows, columns, channels), torch.empty(0, dtype=dtype).numpy().dtype)
    box = (top + row, left + column, rows_used, columns_used)
    canvas[row : row + rows_used, column : column + columns_used] = picture.pixels(
        box, channels=channels, scale_eighths=eighths
    )
    resized = _resize(canvas, *sides, interpolation, like_pillow=like_pillow)
    return resized[first_row : first_row + height, first_column : first_column + width]


def scaled_box(box: Box, scale_eighths: int) -> Box:
    """A box in the image at this scale, with its borders rounded."""
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
    like_pillow: bool = False,
) -> Tensor:
    """Resizes with antialiasing to (height, width, C), by the kernel, torch or Pillow."""
    channels = pixels.shape[2]
    cubic = interpolation == "bicubic"
    # Copied unless its strides are standard. For a view with other strides in axes of length 1, which counts
    # as contiguous, torch 2.15's uint8 kernel reads out of bounds: a segmentation fault.
    if pixels.strides != (pixels.shape[1] * channels, channels, 1) or not pixels.flags.writeable:
        pixels = pixels.copy()
    source = torch.from_numpy(pixels)
    if out is None:
        out = torch.empty(height, width, channels, dtype=source.dtype)
    kernel = native.kernel()
    rows_first = not like_pillow or _pillow_begins_with_rows(pixels, height, width)
    if kernel is not None and kernel.uses_avx2 and pixels.dtype == np.uint8 and rows_first:
        kernel.resize(pixels, out.numpy(), mirror=False, cubic=cubic, like_pillow=like_pillow)
        return out
    if like_pillow:
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
    """Whether every version of Pillow begins with the rows, as the kernel does; Pillow 13 may not."""
    less_height = pixels.shape[0] - height
    less_width = pixels.shape[1] - width
    return bool(less_height <= max(0, 2 * less_width))


def _mirror(x_HWC: Tensor) -> None:
    """Mirror an image in place, ten times faster than NumPy copies reversed columns.

    In pieces that are too small for torch to start its threads: these are for the network, and many decoding
    threads with as many helpers each would compete.
    """
    height, width, channels = x_HWC.shape
    alone = torch.get_num_threads() == 1
    rows = height if alone else max(1, _SERIAL // (width * channels))
    for top in range(0, height, rows):
        piece = x_HWC[top : top + rows]
        piece.copy_(piece.flip(1))


def _as_batch(x_HWC: Tensor) -> Tensor:
    """(1, C, H, W) view of a contiguous image in one call: calls take microseconds after a decoder ran."""
    height, width, channels = x_HWC.shape
    return x_HWC.as_strided(
        (1, channels, height, width), (x_HWC.numel(), 1, width * channels, channels)
    )


def _sources(
    first: int, count: int, length: int, resized: int, interpolation: str
) -> tuple[int, int]:
    """Start and length of the part of a side from which `count` resized positions are computed."""
    step = length / resized
    around = _REACH[interpolation] * max(step, 1.0) + 1  # one more for rounding
    low = max(0, math.floor(first * step - around))
    return low, min(length, math.ceil((first + count) * step + around)) - low
