"""Pixels of an array or of a Pillow image as grey or RGB, with 8 bits or floating-point."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flambeau.errors import UnsupportedImage
from flambeau.images.pixels import Pixels
from flambeau.images.tiff import white_level

_COLORS = (1, 3, 4)
_FEW = 16  # channels rather than pixels of a side; chosen


def of_array(array: NDArray[Any], channels: int) -> Pixels:
    """Pixels of an array; a view of it if nothing must be converted.

    Args:
        array: (H, W) or (H, W, C), C 1, 3 or 4 (the last one alpha), uint8 or uint16; or float32, C 1 or 3. C
            may also be any number equal to `channels`.
    """
    if array.ndim == 3 and array.shape[2] == channels and array.dtype != np.uint16:
        return array
    require_color(array, channels)
    if array.dtype == np.float32:
        return _float_channels(array, channels)
    if array.dtype == np.uint16:
        array = ((array.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    return of_image(to_image(array if array.ndim == 3 else array[:, :, None]), channels)


def of_image(image: Image.Image, channels: int) -> Pixels:
    """Pixels (H, W, channels) of an image of any mode but F, with transparent parts over white."""
    plain = _without_alpha(_of_8_bits(image))
    pixels = np.array(_in_mode(plain, "L" if channels == 1 else "RGB"))
    return pixels.reshape(*pixels.shape[:2], channels)


def to_image(pixels: Pixels) -> Image.Image:
    """A Pillow image of pixels (H, W, 1, 3 or 4) uint8: L, RGB or RGBA."""
    return Image.fromarray(
        np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    )


def channels_axis(shape: tuple[int, ...]) -> int | None:
    """Which end of an image's three-number shape counts channels: 0 or 2; None if unknown.

    One of 1, 3 or 4; else the one beside the sides of a square; else one of at most 16 where the other is
    more.
    """
    first, middle, last = shape
    for at_first, at_last in (
        (first in _COLORS, last in _COLORS),
        (middle == last, first == middle),
        (first <= _FEW, last <= _FEW),
    ):
        if at_first != at_last:
            return 0 if at_first else 2
        if at_first:
            return None
    return None


def num_shown(channels: int) -> int:
    """How many channels a picture of so many shows: the first three, or of two the first."""
    if channels in (1, 3):
        return channels
    return 3 if channels > 3 else 1


def shown_text(channels: int) -> str:
    """Which channels that are."""
    return f"channel{'s 1, 2 and 3' if num_shown(channels) == 3 else ' 1'} of {channels}"


def require_color(array: NDArray[Any], channels: int = 3) -> None:
    """UnsupportedImage for pixels of which `channels` cannot be made, such as grey of seven bands."""
    stored = array.shape[2] if array.ndim == 3 else 1
    if channels not in (1, 3):
        raise UnsupportedImage(f"an image of {stored} channels, where {channels} are wanted")
    if stored not in (1, 3, 4) or (stored == 4 and array.dtype == np.float32):
        counts = "1 or 3 of floating-point pixels" if array.dtype == np.float32 else "1, 3 or 4"
        raise UnsupportedImage(
            f"an array of shape {array.shape}: grey or color is (H, W) or (H, W, C), C {counts}"
        )


def is_grey(image: Image.Image) -> bool:
    """Whether its mode, or its palette, has no color."""
    if image.mode != "P" or image.palette is None:
        return image.mode in ("1", "L", "LA") or image.mode.startswith("I")
    mode, palette = image.palette.getdata()  # RGB, RGBA, or BGRX of a BMP
    colors = np.frombuffer(palette, np.uint8)
    colors = colors[: len(palette) // len(mode) * len(mode)].reshape(-1, len(mode))
    return bool((colors[:, :3] == colors[:, :1]).all())


def _float_channels(array: NDArray[Any], channels: int) -> NDArray[Any]:
    """Floating-point pixels as grey, by ITU-R 601 luma, or with one grey channel repeated three times."""
    if array.ndim == 2:
        array = array[:, :, None]
    if array.shape[2] == channels:
        return array
    if channels == 3:
        return np.repeat(array, 3, axis=2)
    return array @ np.array([[0.299], [0.587], [0.114]], np.float32)


def _of_8_bits(image: Image.Image) -> Image.Image:
    if not image.mode.startswith("I"):
        return image
    levels = np.asarray(image).astype(np.int64)
    if levels.min() < 0 or levels.max() > 65535:
        raise UnsupportedImage(
            "32-bit pixels beyond 0 .. 65535 have no defined brightness; save 8 or 16 bits"
        )
    white = white_level(image)
    return Image.fromarray(((levels * 255 + white // 2) // white).astype(np.uint8))


def _without_alpha(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image
    if image.mode == "La":  # grey multiplied by alpha, from which Pillow converts to LA alone
        image = image.convert("LA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    # Through RGB, to which Pillow converts every mode; grey levels stay the same.
    return image.convert("RGB") if mode == "RGB" else image.convert("RGB").convert(mode)
