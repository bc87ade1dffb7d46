"""All 16 bits of the levels of an image, of which Pillow gives 8 where there is color.

Pillow's decoders keep the high byte of each level. Given the opposite byte order they keep the low one, so
two passes give both.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from flambeau.errors import UnsupportedImage
from flambeau.images.tiff import Kind

_WHITE = 65535

# Pillow's names of the layouts in a file, and of the same with the bytes the other way round.
_SWAPPED = {
    f"{mode};16{order}": f"{mode};16{other}"
    for mode in ("RGB", "RGBA")
    for order, other in (("B", "L"), ("L", "B"), ("N", "B" if sys.byteorder == "little" else "L"))
}


def is_wide(image: Image.Image) -> bool:
    """Whether an opened image, not yet decoded, has readable levels of more than 8 bits."""
    if isinstance(image, TiffImageFile) and Kind(image.tag_v2).is_separate:
        return False  # of planes Pillow keeps the high bytes for either byte order
    return image.mode.startswith("I") or _layout(image) in _SWAPPED


def wide_levels(
    open_image: Callable[[], Image.Image], *, keep_alpha: bool = False
) -> NDArray[np.uint16]:
    """The levels (H, W, 1 or 3) of an image of 16 bits (`is_wide`); transparent parts over white.

    Args:
        open_image: gives the image anew.
        keep_alpha: all channels, up to 4, as stored.

    Raises:
        UnsupportedImage: of 32 bits, with levels beyond 16.
    """
    image = open_image()
    layout = _layout(image)
    hidden = image.info.get("transparency")
    levels = np.asarray(image).astype(np.int64)
    if levels.ndim == 2:
        if levels.min() < 0 or levels.max() > _WHITE:
            raise UnsupportedImage(
                "32-bit pixels beyond 0 .. 65535 have no defined brightness; save 8 or 16 bits"
            )
        levels = levels[:, :, None]
    else:
        image = open_image()
        assert isinstance(image, ImageFile.ImageFile)
        for number, tile in enumerate(image.tile):
            swapped = _SWAPPED[layout]
            more = tile.args[1:] if isinstance(tile.args, tuple) else None
            args = swapped if more is None else (swapped, *more)
            image.tile[number] = tile._replace(args=args)
        levels = levels << 8 | np.asarray(image)
    if keep_alpha:
        return levels.astype(np.uint16)
    if hidden is not None:  # a level, or a color, that is transparent
        levels[(levels == hidden).all(2)] = _WHITE
    return over_white(levels)


def over_white(levels: NDArray[Any]) -> NDArray[np.uint16]:
    """Levels (H, W, 1, 3 or 4) of 16 bits without their alpha: (H, W, 1 or 3)."""
    if levels.shape[2] == 4:
        wide = levels.astype(np.int64)
        alpha = wide[:, :, 3:]
        levels = (wide[:, :, :3] * alpha + _WHITE * (_WHITE - alpha) + _WHITE // 2) // _WHITE
    return levels.astype(np.uint16)


def _layout(image: Image.Image) -> str:
    """The layout of the levels in the file, by the name that Pillow's decoders have for it."""
    tiles = getattr(image, "tile", [])
    args = tiles[0].args if tiles else ""
    return str(args[0] if isinstance(args, tuple) else args)
