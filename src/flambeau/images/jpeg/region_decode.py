"""Decodes only the needed part of a JPEG, by the C kernel or simplejpeg; Pillow reads what they cannot.

JPEG: ITU-T T.81, annex B (markers), A.2.3 (order of the units in a scan).
simplejpeg contains libjpeg-turbo, which decodes from the first row on.

The pixels equal those of a full decode, cropped: the choice of the library changes only the speed.
What is saved:
- A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size.
- Rows below the part are not decoded: the decoder gets the JPEG with a smaller height in its header, and
  stops there. That needs all components in one sequential scan, as in common JPEGs.
- The C kernel (images/native) only reads what lies above and beside the part, and does not transform it. It
  accepts undamaged JPEGs of one sequential scan.
- Of a JPEG whose scan is cut into segments (scan_segments.py) the kernel reads only those under the part. For
  other decoders it is an ordinary JPEG.
"""

import numpy as np
import simplejpeg

from flambeau.images.jpeg.headers import JpegHeader
from flambeau.images.native import kernel as native
from flambeau.images.pixels import Box, Pixels

# 8 is the full size. Other scales are slower than that: their transforms are not in SIMD.
SCALES_EIGHTHS = (1, 2, 4, 8)

# Rows below a part that affect its last row: chroma of half the height is interpolated between rows.
_MARGIN = 2

# Marks a row that was not written; if it is a picture's real last row, Pillow decodes the picture.
_UNWRITTEN = 0xA5


def scaled(side: int, scale_eighths: int) -> int:
    """Pixels of a side at a scale, as libjpeg rounds them: up."""
    return -(-side * scale_eighths // 8)


def decode_region(
    data: bytes, header: JpegHeader, box: Box, *, scale_eighths: int, channels: int
) -> Pixels | None:
    """A part of a JPEG, (height, width, channels) uint8, often a view; the box is in the scaled stored image.

    None if it may be truncated, or libjpeg-turbo does not ignore its damage: then Pillow decides.
    """
    # Entropy-coded data contain no such pair but the end marker; libjpeg-turbo would invent missing pixels.
    if data.rfind(b"\xff\xd9", header.scan_at) < 0:
        return None
    top, left, height, width = box
    out = np.empty((height, width, channels), np.uint8)
    if decode_by_kernel(data, header, box, out, scale_eighths=scale_eighths):
        return out
    bottom = (top + height + _MARGIN) * 8 // scale_eighths
    data, rows = _without_rows_below(data, header, bottom)
    pixels = _by_simplejpeg(data, header, rows, scale_eighths, channels)
    return None if pixels is None else pixels[top : top + height, left : left + width]


def decode_by_kernel(
    data: bytes,
    header: JpegHeader,
    box: Box,
    out: Pixels,
    *,
    scale_eighths: int,
    resize: bool = False,
    mirror: bool = False,
    cubic: bool = False,
) -> bool:
    """A part of a JPEG by the C kernel, with the arguments of its `decode_region`.

    False without a faster kernel, and for a progressive or damaged file: then libjpeg-turbo decides.
    """
    kernel = native.kernel()
    if kernel is None or not (kernel.uses_avx2 or header.segmented):
        return False  # libjpeg-turbo has SIMD for every CPU
    if not header.sequential or data.rfind(b"\xff\xd9", header.scan_at) < 0:
        return False
    try:
        kernel.decode_region(
            data, box, out, scale_eighths=scale_eighths, resize=resize, mirror=mirror, cubic=cubic
        )
    except native.KernelError:
        return False
    return True


def _without_rows_below(data: bytes, header: JpegHeader, bottom: int) -> tuple[bytes, int]:
    """The file with a height of at least `bottom` rows, and that height; the pixels do not change."""
    rows = -(-bottom // header.unit_height) * header.unit_height
    if not header.sequential or rows >= header.height:
        return data, header.height
    at = header.height_at
    return b"".join((data[:at], rows.to_bytes(2, "big"), data[at + 2 :])), rows


def _by_simplejpeg(
    data: bytes, header: JpegHeader, rows: int, scale_eighths: int, channels: int
) -> Pixels | None:
    size = scaled(rows, scale_eighths), scaled(header.width, scale_eighths)
    out = np.empty((*size, channels), np.uint8)
    out[-1] = _UNWRITTEN
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            "RGB" if channels == 3 else "GRAY",
            min_height=out.shape[0],
            min_width=out.shape[1],
            min_factor=8 // scale_eighths,
            buffer=out,
            strict=False,  # as Pillow: warnings of libjpeg-turbo are ignored
        )
    except (ValueError, MemoryError):
        return None
    # After a warning libjpeg-turbo also reports an error as a warning, and stops.
    is_written = bool((out[-1] != _UNWRITTEN).any())
    return out if pixels.shape == out.shape and is_written else None
