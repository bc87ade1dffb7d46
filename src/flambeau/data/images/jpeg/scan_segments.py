"""Random access inside a JPEG: cut it losslessly into segments, and decode only those under a box.

Source: own, after ITU-T T.81 (JPEG), B.2.1 and B.2.4.4 (restart markers). The format: docs/en/packed_jpeg.md.
When not to use it: for pictures that are always used whole, where it only costs some bytes.
"""

import struct
from typing import Literal, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from flambeau.data.images.jpeg.headers import (
    Jpeg,
    JpegError,
    Spans,
    has_index,
    put_marker,
    read_markers,
)
from flambeau.data.images.jpeg.scan_segments_numpy import transcode
from flambeau.data.images.native import kernel as native
from flambeau.errors import DecodeError

Pixels = NDArray[np.uint8]

_REASONS = {
    native.BAD_HEADER: "not a JPEG, or its headers are damaged",
    native.NO_INDEX: "it has no usable index of segments",
    native.UNSUPPORTED: "a kind of JPEG that cannot be cut into segments",
    native.DAMAGED: "its data is damaged or cut short",
}

# Version 1.1, no unit, no preview: simplejpeg refuses versions that it does not know.
_JFIF = b"JFIF\0\1\1\0\0\1\0\1\0\0"


class CannotSegment(ValueError):
    """This file stays as it is; the message is the reason."""


def segment(data: bytes, *, interval_px: int = 64) -> bytes:
    """A JPEG of the same coefficients, so of the same pixels, that `decode_region` can enter anywhere.

    Any decoder reads it. Metadata is kept, EXIF orientation too; what follows the image in the file
    (previews, further images) is left out. The Huffman codes are made anew for the image, which often saves
    what the restart markers cost. To segment a segmented file again changes nothing.

    Args:
        data: a JPEG with 1 or 3 components of 8 bits, Huffman-coded; with the C kernel also a progressive
            one or one with several scans.
        interval_px: about how wide a segment shall be, 1 to 4096 pixels.

    Raises:
        CannotSegment: another kind of file, or one that is damaged in the slightest; keep it as it is.

    Example:
        >>> image = np.zeros((40, 300, 3), np.uint8)
        >>> data = simplejpeg.encode_jpeg(image, colorsubsampling="420")
        >>> cut = segment(data)
        >>> is_segmented(data), is_segmented(cut), cut == segment(cut)
        (False, True, True)
    """
    if not 1 <= interval_px <= 4096:
        raise ValueError(f"interval_px must be 1 to 4096, got {interval_px}")
    kernel = native.kernel()
    try:
        if kernel is None:
            return transcode(data, interval_px=interval_px)
        return kernel.segment(data, interval_px)
    except JpegError as error:
        raise CannotSegment(str(error)) from error
    except native.KernelError as error:
        raise CannotSegment(_reason(error)) from error


def is_segmented(data: bytes) -> bool:
    """Whether `decode_region` can read it: it has the index of `segment`. Looks at the headers only."""
    return has_index(data)


def decode_region(
    data: bytes,
    top: int,
    left: int,
    height: int,
    width: int,
    *,
    scale: Literal[1, 2, 4, 8] = 8,
    channels: Literal[1, 3] = 3,
    out: Pixels | None = None,
    spans: Spans | None = None,
) -> Pixels:
    """The pixels of a box, equal to the bit to the same box of the whole image decoded by libjpeg-turbo.

    Of a whole decode with exact DCT (`islow`) and smooth chroma ('fancy upsampling'), that is.
    The image is taken as it is stored: EXIF orientation is not applied.

    Args:
        data: what `segment` returned.
        top, left, height, width: the box in pixels of the image at this scale; height and width at least 1.
        scale: eighths; below 8 the image has ceil(scale / 8 * side) pixels a side.
        channels: 3 for RGB, 1 for grey (luma).
        out: where to put them, (height, width, channels) uint8, contiguous; by default a new array.
        spans: the marker segments, where the caller has them already (`jpeg_markers.walk`).

    Returns:
        (height, width, channels) uint8; `out` if it was given.

    Raises:
        DecodeError: not segmented, or damaged under the box.
        ValueError: the box is not within the image; a reduced scale of an image below 8 x 8 pixels.

    Example:
        >>> image = np.arange(90 * 120 * 3, dtype=np.uint8).reshape(90, 120, 3)
        >>> data = segment(simplejpeg.encode_jpeg(image, colorsubsampling="420"))
        >>> box = decode_region(data, 30, 40, 20, 50)
        >>> np.array_equal(box, simplejpeg.decode_jpeg(data)[30:50, 40:90])
        True
    """
    if scale not in (1, 2, 4, 8) or channels not in (1, 3):
        raise ValueError(f"scale is 1, 2, 4 or 8, channels 1 or 3; got {scale} and {channels}")
    shape = (height, width, channels)
    if min(height, width) < 1 or min(top, left) < 0 or max(top + height, left + width) > 65_535:
        raise _no_box(top, left, height, width)
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.shape != shape or out.dtype != np.uint8 or not out.flags.carray:
        raise ValueError(f"out must be uint8 of shape {shape}, contiguous and writable")
    kernel = native.kernel()
    box = (top, left, height, width)
    try:
        if kernel is None:
            decode_by_header(read_markers(data, spans), data, box, out, scale=scale)
        else:
            kernel.decode_region(data, box, out, scale=scale, need_index=True)
    except JpegError as error:
        raise DecodeError(str(error)) from error
    except native.KernelError as error:
        if error.code == native.BAD_BOX:
            raise _no_box(*box) from error
        raise DecodeError(_reason(error)) from error
    return out


def decode_by_header(
    jpeg: Jpeg, data: bytes, box: tuple[int, int, int, int], out: Pixels, *, scale: int
) -> None:
    """`decode_region` without the kernel: a small JPEG of the segments under the box, decoded by simplejpeg.

    Raises:
        JpegError: not segmented, or damaged.
        ValueError: as `decode_region`.
    """
    top, left, height, width = box
    full = (-(-jpeg.height * scale // 8), -(-jpeg.width * scale // 8))
    tiny = scale < 8 and max(jpeg.height, jpeg.width) < 8
    if tiny or top + height > full[0] or left + width > full[1]:
        raise _no_box(*box)
    down, across = (side * scale // 8 for side in jpeg.mcu)
    # Interpolated chroma looks at the next pixel.
    y, x = int(jpeg.mcu[0] > 8), int(jpeg.mcu[1] > 8)
    runs = _runs_under(
        jpeg,
        (max(0, top - y) // down, min(jpeg.mcus[0], (top + height - 1 + y) // down + 1)),
        (max(0, left - x) // across, min(jpeg.mcus[1], (left + width - 1 + x) // across + 1)),
    )
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            _small_jpeg(data, jpeg, runs),
            "RGB" if out.shape[2] == 3 else "GRAY",
            # The smallest scale of libjpeg that still has these sides is the one that is wanted.
            min_height=-(-runs.height * scale // 8),
            min_width=-(-runs.width * scale // 8),
        )
    except ValueError as error:
        raise JpegError(f"its data is damaged: {error}") from error
    top -= runs.row * down
    if len(runs.columns) == 1:
        left -= runs.columns[0] * across
        out[:] = pixels[top : top + height, left : left + width]
        return
    for k, column in enumerate(runs.columns):  # each row of MCUs begins at another place
        first, last = max(k * down, top), min((k + 1) * down, top + height)
        begin = left - column * across
        out[first - top : last - top] = pixels[first:last, begin : begin + width]


def _reason(error: native.KernelError) -> str:
    if error.code == native.NO_MEMORY:
        raise MemoryError("no memory for the coefficients or samples of a JPEG") from error
    return _REASONS[error.code]


def _no_box(top: int, left: int, height: int, width: int) -> ValueError:
    return ValueError(
        f"no box of {height} x {width} pixels at row {top}, column {left} in the image at this scale"
    )


class _Runs(NamedTuple):
    """Segments that make a small JPEG, in its order.

    Attributes:
        numbers: (R, S), R runs of S segments that follow each other in the file.
        height, width: of the small JPEG, pixels.
        row: of MCUs at which it begins.
        columns: of MCUs at which its rows of MCUs begin; one, if at the same.
    """

    numbers: NDArray[np.int64]
    height: int
    width: int
    row: int
    columns: list[int]


def _runs_under(jpeg: Jpeg, rows: tuple[int, int], columns: tuple[int, int]) -> _Runs:
    """The segments over these MCUs, and over no more than must be."""
    interval = jpeg.restart_interval
    height, width = jpeg.mcus
    if (
        jpeg.bounds is None
        or not interval
        or len(jpeg.bounds) != -(-height * width // interval) + 1
    ):
        raise JpegError(_REASONS[native.NO_INDEX])
    at = np.arange(*rows) * width
    if width % interval == 0:
        first, last = columns[0] // interval, -(-columns[1] // interval)
        numbers = (at // interval)[:, None] + np.arange(first, last)
        starts = [first * interval]
        end = min(last * interval * jpeg.mcu[1], jpeg.width)
    elif jpeg.mcu == (8, 8) and (wrapped := _wrapped(at, columns, interval, height * width)):
        # MCUs that do not look at each other: each row has segments of its own.
        numbers, starts = wrapped
        end = (starts[0] + numbers.shape[1] * interval) * 8
    else:  # whole rows, from one at whose start a segment starts to another one
        marks = [row for row in range(height) if row * width % interval == 0] + [height]
        rows = max(r for r in marks if r <= rows[0]), min(r for r in marks if r >= rows[1])
        numbers = np.arange(rows[0] * width // interval, -(-rows[1] * width // interval))[None]
        starts, end = [0], jpeg.width
    bottom = min(rows[1] * jpeg.mcu[0], jpeg.height)
    return _Runs(
        numbers, bottom - rows[0] * jpeg.mcu[0], end - starts[0] * jpeg.mcu[1], rows[0], starts
    )


def _wrapped(
    at: NDArray[np.int64], columns: tuple[int, int], interval: int, count: int
) -> tuple[NDArray[np.int64], list[int]] | None:
    """Segments over columns of rows that begin at these MCUs, and the columns that each row's start at.

    None where the last segment of all is among them, which may be a short one.
    """
    first = (at + columns[0]) // interval
    most = int(((at + columns[1] - 1) // interval - first).max()) + 1
    if first[-1] + most > count // interval:
        return None
    return first[:, None] + np.arange(most), (first * interval - at).tolist()


def _small_jpeg(data: bytes, jpeg: Jpeg, runs: _Runs) -> bytearray:
    """A JPEG of these segments."""
    bounds = jpeg.bounds
    assert bounds is not None
    if (
        data[bounds[-1] - 2 : bounds[-1]] != b"\xff\xd9"
    ):  # cut short, or not the index of these data
        raise JpegError(_REASONS[native.DAMAGED])
    begins = bounds[runs.numbers[:, 0]].tolist()
    ends = bounds[runs.numbers[:, -1] + 1].tolist()
    view = memoryview(data)
    pieces = [view[begin:end] for begin, end in zip(begins, ends, strict=True)]
    header = _header(jpeg, runs.height, runs.width)
    out = header + b"".join(pieces)

    # Restart markers count from 0 again; the end of the image stands behind the last one.
    numbers = runs.numbers.ravel()
    stream = np.frombuffer(out, np.uint8)
    at = (bounds[numbers + 1] - bounds[numbers]).cumsum() + (len(header) - 1)
    expected = 0xD0 | numbers & 7
    if numbers[-1] == len(bounds) - 2:
        expected[-1] = 0xD9
    if (stream[at - 1] != 0xFF).any() or (stream[at] != expected).any():
        raise JpegError(_REASONS[native.DAMAGED])
    stream[at] = 0xD0 | np.arange(len(numbers)) & 7
    stream[-1] = 0xD9
    return out


def _header(jpeg: Jpeg, height: int, width: int) -> bytearray:
    """The headers for an image of this size, without what does not bear on the pixels."""
    out = bytearray(b"\xff\xd8")
    for marker, body in jpeg.segments:
        if marker <= 0xC1:
            out += put_marker(marker, body[:1] + struct.pack(">HH", height, width) + body[5:])
        elif marker == 0xE0 and body.startswith(b"JFIF"):
            out += put_marker(marker, _JFIF)
        elif marker < 0xE0 or marker == 0xEE:  # Adobe's and JFIF's say what the components mean
            out += put_marker(marker, body)
    return out
