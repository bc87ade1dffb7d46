"""TIFF files of several samples per pixel, all of them as they are stored: bands of a satellite, stains.

Source: TIFF 6.0, sections 8 (BitsPerSample, PlanarConfiguration), 14 (differencing) and 15 (tiles).

Pillow decodes grey alone of any number of samples, so a file is given to it as what its bytes also are: one
grey image whose rows have the samples of all channels one after the other, or one grey image for each plane.
Differences are summed up here, since they are between samples of the same channel.
"""

import io
import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import PREFIXES
from PIL.TiffImagePlugin import ImageFileDirectory_v2 as Tags

from flambeau.errors import UnsupportedImage
from flambeau.images.exif_orientation import UPRIGHT, swaps_sides, turn_upright
from flambeau.images.pillow_messages import silence_libtiff, silence_warnings
from flambeau.images.pixels import MAX_CHANNELS, MAX_PIXELS
from flambeau.images.tiff import DAMAGED, Kind, first_page

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _COLOR = 256, 257, 258, 259, 262
_STRIPS, _ORIENTATION, _SAMPLES, _ROWS, _STRIP_BYTES = 273, 274, 277, 278, 279
_PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT, _TILES, _TILE_BYTES = 317, 322, 323, 324, 325
_LONG = 4  # the type of 32 bits
_HEADER_BYTES = 8

# Compressions of bytes, whatever these stand for, and how many bytes one byte of each can become at most;
# None: without a limit. Deflate 1032; LZW 1365, of codes of 12 bits.
_MOST_TIMES = {1: 1, 5: 1400, 8: 1400, 32946: 1400, 32773: 64, 34925: None, 50000: None}
_WITH_DIFFERENCES = (5, 8, 32946, 34925, 50000)  # readers disagree on them with another one
_PLAIN = 1
_GREY, _RGB = 1, 2
_UNSIGNED = 1
_NO_DIFFERENCES, _DIFFERENCES = 1, 2


class Stack(NamedTuple):
    """What the tags of a file say that `samples` reads.

    Attributes:
        has_more_channels: they are more than grey or color and an alpha.
    """

    height: int
    width: int
    channels: int
    bits: int
    has_more_channels: bool
    tags: Tags


def read_header(data: bytes) -> Stack | None:
    """The header of a TIFF of several grey or RGB samples per pixel; None for any other image.

    UnsupportedImage: too many channels, or more samples than its bytes can hold.
    """
    if not data.startswith(tuple(PREFIXES)) or data.startswith(b"MM\0\x2b"):
        return None
    try:
        tags = first_page(data)
        kind = Kind(tags)
        if kind.samples < 2 or kind.color not in (_GREY, _RGB):
            return None
        width, height = int(tags[_WIDTH]), int(tags[_HEIGHT])
        why = _why_not(kind, tags, height, width, len(data))
    except DAMAGED:
        return None  # Pillow says what is damaged
    if why is None:
        is_more = kind.has_more_channels
        return Stack(height, width, kind.samples, kind.bits[0], is_more, tags)
    if kind.has_more_channels:
        raise UnsupportedImage(f"{kind.name}: {why}")
    return None


def samples(data: bytes, stack: Stack) -> NDArray[Any]:
    """All samples, upright, (height, width, channels) uint8 or uint16; any error of Pillow if damaged."""
    kind = Kind(stack.tags)
    if not kind.is_separate:
        planes = [_plane(data, stack, 0, stack.channels)]
    else:
        planes = [_plane(data, stack, number, 1) for number in range(stack.channels)]
    x_HWC = planes[0] if len(planes) == 1 else np.concatenate(planes, axis=2)
    return np.ascontiguousarray(turn_upright(x_HWC, _orientation(stack)))


def upright_size(stack: Stack) -> tuple[int, int]:
    sides = stack.height, stack.width
    return sides[::-1] if swaps_sides(_orientation(stack)) else sides


def _orientation(stack: Stack) -> int:
    orientation = int(stack.tags.get(_ORIENTATION, UPRIGHT))
    return orientation if orientation in range(1, 9) else UPRIGHT


def _why_not(kind: Kind, tags: Tags, height: int, width: int, size: int) -> str | None:
    """Why a file of several samples cannot be read; None if it can."""
    if kind.samples > MAX_CHANNELS:
        return f"{kind.samples} channels are more than {MAX_CHANNELS}, the most that are read"
    if height < 1 or width < 1:
        return "no pixel at all"
    count = height * width * kind.samples
    if count > MAX_PIXELS:
        return f"{width} x {height} x {kind.samples} samples are more than {MAX_PIXELS}, the most allowed"
    if {*kind.bits} not in ({8}, {16}) or len(kind.bits) not in (1, kind.samples):
        return "samples of 8 or of 16 bits are read"
    if kind.numbers != _UNSIGNED:
        return "whole numbers without a sign are read"
    if kind.compression not in _MOST_TIMES or kind.bits_are_reversed:
        return (
            "samples without compression, or compressed by LZW, Deflate, PackBits or ZSTD are read"
        )
    predictor = int(tags.get(_PREDICTOR, _NO_DIFFERENCES))
    known = (_NO_DIFFERENCES, _DIFFERENCES) if kind.compression in _WITH_DIFFERENCES else (1,)
    if predictor not in known:
        return f"predictor {predictor} is not read"
    times = _MOST_TIMES[kind.compression]
    if times is not None and count * kind.bits[0] // 8 > times * size:
        return (
            f"{width} x {height} x {kind.samples} samples are more than its {size} bytes can hold"
        )
    return None


def _plane(data: bytes, stack: Stack, number: int, channels: int) -> NDArray[Any]:
    silence_warnings()
    grey = _as_grey(data, stack, number, channels)
    with Image.open(io.BytesIO(grey), formats=["TIFF"]) as image:
        silence_libtiff()
        levels = np.asarray(image)
    dtype = np.uint8 if stack.bits == 8 else np.uint16
    wanted = (stack.height, stack.width * channels)
    if levels.shape != wanted or levels.dtype.kind not in "ui":
        raise ValueError(f"its pixels are of {levels.shape} {levels.dtype}, expected {wanted}")
    x_HWC = levels.astype(dtype).reshape(stack.height, stack.width, channels)
    if int(stack.tags.get(_PREDICTOR, _NO_DIFFERENCES)) == _DIFFERENCES:
        # Each tile begins anew.
        step = int(stack.tags[_TILE_WIDTH]) if _TILE_WIDTH in stack.tags else stack.width
        for left in range(0, stack.width, step):
            part = x_HWC[:, left : left + step]
            part.cumsum(axis=1, dtype=dtype, out=part)
    return x_HWC


def _as_grey(data: bytes, stack: Stack, number: int, channels: int) -> bytes:
    """A file with the same strips or tiles as one grey image, `channels` times as wide."""
    tags = stack.tags
    is_tiled = _TILE_WIDTH in tags
    entries = {
        _WIDTH: [stack.width * channels],
        _HEIGHT: [stack.height],
        _BITS: [stack.bits],
        _COMPRESSION: [int(tags.get(_COMPRESSION, _PLAIN))],
        _COLOR: [_GREY],
        _SAMPLES: [1],
    }
    if is_tiled:
        sides = [int(tags[_TILE_WIDTH]), int(tags[_TILE_HEIGHT])]
        if min(sides) < 1 or max(sides) > 1 << 16:
            raise ValueError(f"tiles of {sides[0]} x {sides[1]} pixels")
        entries[_TILE_WIDTH], entries[_TILE_HEIGHT] = [sides[0] * channels], [sides[1]]
        count = -(-stack.width // sides[0]) * -(-stack.height // sides[1])
    else:
        rows = min(stack.height, int(tags.get(_ROWS, stack.height)))
        if rows < 1:
            raise ValueError("strips without rows")
        entries[_ROWS] = [rows]
        count = -(-stack.height // rows)
    places = (_TILES, _TILE_BYTES) if is_tiled else (_STRIPS, _STRIP_BYTES)
    parts = range(number * count, (number + 1) * count)
    starts, sizes = (
        _numbers(tags[tag], parts, count * stack.channels // channels) for tag in places
    )
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    if min(starts) < 1 or min(sizes) < 1 or max(ends) > len(data):
        raise ValueError("a part lies outside the file")
    first = min(starts)
    entries |= {places[0]: [start - first + _HEADER_BYTES for start in starts], places[1]: sizes}
    return _file(data[:2], data[first : max(ends)], entries)


def _numbers(values: Any, parts: range, wanted: int) -> list[int]:
    if len(values) != wanted:
        raise ValueError(f"{len(values)} parts, where its size needs {wanted}")
    return [int(values[part]) for part in parts]


def _file(mark: bytes, body: bytes, entries: dict[int, list[int]]) -> bytes:
    """A TIFF of numbers of 32 bits with the same order of bytes: a header, the parts and a directory."""
    order = "<" if mark == b"II" else ">"
    padding = bytes(len(body) % 2)
    start = _HEADER_BYTES + len(body) + len(padding)
    after = start + 2 + 12 * len(entries) + 4
    directory = struct.pack(f"{order}H", len(entries))
    values = b""
    for tag, numbers in sorted(entries.items()):
        place = numbers[0] if len(numbers) == 1 else after + len(values)
        directory += struct.pack(f"{order}HHII", tag, _LONG, len(numbers), place)
        if len(numbers) > 1:
            values += struct.pack(f"{order}{len(numbers)}I", *numbers)
    header = mark + struct.pack(f"{order}HI", 42, start)
    return b"".join((header, body, padding, directory, bytes(4), values))
