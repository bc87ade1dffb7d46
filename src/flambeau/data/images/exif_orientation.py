"""EXIF orientation: which way up the stored pixels are, and how to turn them and a box in them.

Source: EXIF 2.32 (CIPA DC-008), section 4.6.4 A, tag 0x0112.
"""

from typing import Any, Literal

from numpy.typing import NDArray

from flambeau.data.images.pixels import Box

UPRIGHT = 1


def exif_orientation(exif: bytes) -> int:
    """The orientation in EXIF data; 1, upright, where there is none or the data are damaged.

    Read by hand: Pillow reads all of EXIF for it, slowly, and fails where another tag is damaged.

    Args:
        exif: from its "Exif\\0\\0" or the TIFF header behind that on; any bytes.

    Returns:
        1 to 8.

    Example:
        >>> tag = b"\\x12\\x01\\x03\\0\\x01\\0\\0\\0\\x06\\0\\0\\0"
        >>> exif_orientation(b"Exif\\0\\0II*\\0\\x08\\0\\0\\0\\x01\\0" + tag)
        6
    """
    tiff = exif.removeprefix(b"Exif\0\0")
    orders: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
    if tiff[:4] not in orders:
        return UPRIGHT
    order = orders[tiff[:4]]

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)

    first = number(4, 4) + 2
    last = min(first + 12 * number(first - 2, 2), len(tiff) - 11)
    for entry in range(first, last, 12):
        if number(entry, 2) == 0x0112:
            value = number(entry + 8, 2)
            return value if 1 <= value <= 8 else UPRIGHT
    return UPRIGHT


def swaps_sides(orientation: int) -> bool:
    """Whether height and width change places when an image of this orientation is turned upright."""
    return orientation >= 5


def turn_upright(pixels: NDArray[Any], orientation: int) -> NDArray[Any]:
    """Stored pixels (H, W, C) as a view that is upright.

    Example:
        >>> import numpy as np
        >>> turn_upright(np.arange(6).reshape(2, 3, 1), 6)[:, :, 0].tolist()
        [[3, 0], [4, 1], [5, 2]]
    """
    if swaps_sides(orientation):
        pixels = pixels.swapaxes(0, 1)
    rows, columns = _mirrored(orientation)
    return pixels[:: -1 if rows else 1, :: -1 if columns else 1]


def stored_box(box: Box, orientation: int, height: int, width: int) -> Box:
    """Where a box of the upright image lies in the stored one.

    Args:
        box: in the upright image.
        orientation: 1 to 8.
        height: of the upright image.
        width: of the upright image.

    Example:
        >>> stored_box((0, 0, 1, 2), 6, height=3, width=2)
        (0, 0, 2, 1)
    """
    top, left, h, w = box
    rows, columns = _mirrored(orientation)
    top = height - top - h if rows else top
    left = width - left - w if columns else left
    return (left, top, w, h) if swaps_sides(orientation) else (top, left, h, w)


def _mirrored(orientation: int) -> tuple[bool, bool]:
    """Whether rows and columns run backwards, once the sides have changed places."""
    return orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
