"""Orientation in EXIF or XMP: which way up the stored pixels are, and how to turn them and a box in them.

Source: EXIF 2.32 (CIPA DC-008), section 4.6.4 A, tag 0x0112; XMP (ISO 16684-1), tiff:Orientation. Locations
and priorities are those of Pillow's ImageOps.exif_transpose.
"""

import contextlib
import re
import struct
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from flambeau.images.pixels import Box

UPRIGHT = 1

_TAG = 0x0112
# The last two violate the specification, but are in use.
_BYTE_ORDERS = {b"II*\0": "<", b"MM\0*": ">", b"MM*\0": ">", b"II\0*": "<"}
# struct formats of the TIFF types; Pillow ignores an orientation that it does not read as a number.
_TYPES = dict(zip(range(1, 14), "BBHLQbBhlQfdL", strict=True)) | {16: "Q"}
_NO_NUMBERS = (1, 2, 5, 7, 10)
_IN_XMP = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')


def exif_orientation(exif: bytes, xmp: bytes = b"") -> int:
    """The orientation in EXIF data, else in XMP; 1, upright, if there is none or the data are damaged.

    Pillow reads all of EXIF for it, slowly, and fails if another tag is damaged.

    Args:
        exif: from its "Exif\\0\\0" or the TIFF header after that on; any bytes.
    """
    value = _in_exif(exif)
    if value is None:
        match = _IN_XMP.search(xmp)
        value = int(match[1]) if match else UPRIGHT
    return int(value) if value in range(1, 9) else UPRIGHT


def info_orientation(info: Mapping[Any, Any]) -> int:
    """The orientation, 1 to 8, from Pillow's `info`; a PNG must be loaded before."""
    exif, raw = info.get("exif"), info.get("Raw profile type exif")
    # Written by ImageMagick: empty, name, length, hexadecimal digits.
    if exif is None and isinstance(raw, str):
        with contextlib.suppress(ValueError):
            exif = bytes.fromhex("".join(raw.split("\n")[3:]))
    xmp = info.get("XML:com.adobe.xmp") or info.get("xmp")
    if isinstance(xmp, str):
        xmp = xmp.encode(errors="replace")
    return exif_orientation(*(part if isinstance(part, bytes) else b"" for part in (exif, xmp)))


def _in_exif(exif: bytes) -> float | None:
    """The value of the tag, of which 1 to 8 are valid; None if there is none."""
    tiff = exif.removeprefix(b"Exif\0\0").removeprefix(b"Exif\0\0")
    order = _BYTE_ORDERS.get(tiff[:4])
    if order is None or len(tiff) < 10:
        return None

    def number(at: int, kind: str) -> Any:
        return struct.unpack_from(order + kind, tiff, at)[0]

    first = number(4, "L") + 2
    if first > len(tiff):
        return None
    last = min(first + 12 * number(first - 2, "H"), len(tiff) - 11)
    for entry in range(first, last, 12):
        if number(entry, "H") != _TAG:
            continue
        kind = number(entry + 2, "H")
        count = number(entry + 4, "L")
        at = entry + 8
        if not count or kind not in _TYPES:
            continue
        size = count * struct.calcsize(order + _TYPES[kind])
        if size > 4:
            at = number(at, "L")
        if at + size <= len(tiff):
            return UPRIGHT if kind in _NO_NUMBERS else float(number(at, _TYPES[kind]))
    return None


def swaps_sides(orientation: int) -> bool:
    """Whether turning an image of this orientation upright swaps height and width."""
    return orientation >= 5


def turn_upright(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Stored pixels (H, W, C) as a view that is upright."""
    if swaps_sides(orientation):
        pixels = pixels.swapaxes(0, 1)
    rows, columns = _mirrored(orientation)
    return pixels[:: -1 if rows else 1, :: -1 if columns else 1]


def stored_box(box: Box, orientation: int, height: int, width: int) -> Box:
    """The box in the stored image of a box in the upright one."""
    top, left, h, w = box
    rows, columns = _mirrored(orientation)
    top = height - top - h if rows else top
    left = width - left - w if columns else left
    return (left, top, w, h) if swaps_sides(orientation) else (top, left, h, w)


def _mirrored(orientation: int) -> tuple[bool, bool]:
    """Whether rows and columns are reversed, after the sides have been swapped."""
    return orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
