"""TIFF files whose pages are the channels of one image, as microscopes and ImageJ write them.

Nothing in a file says whether its pages are channels or images of their own, so they are read as channels
only where so many are wanted. Each page must be grey, and all of one size and depth.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from flambeau.errors import DecodeError, UnsupportedImage
from flambeau.images import tiff
from flambeau.images.pixels import MAX_CHANNELS, MAX_PIXELS
from flambeau.images.wide_levels import is_wide, wide_levels

_GREY = ("1", "L", "I", "I;16", "I;16B", "I;16L", "I;16N")


def num_pages(image: Image.Image) -> int:
    """The pages of an opened image, up to one more than there can be channels; 1 if the first is not grey."""
    if not isinstance(image, TiffImageFile) or image.mode not in _GREY:
        return 1
    try:
        for page in range(1, MAX_CHANNELS + 1):
            image.seek(page)
    except EOFError:
        return page
    finally:
        image.seek(0)
    return MAX_CHANNELS + 1


def of_pages(image: Image.Image, count: int) -> NDArray[Any]:
    """The pages of a TIFF side by side, turned upright by its orientation.

    Args:
        image: just opened, with so many pages.

    Returns:
        (H, W, count) uint8 or uint16.

    Raises:
        DecodeError: pages that differ in size or depth, or more pixels than are allowed.
        UnsupportedImage: a page that is not grey, or of a kind that is not read.
    """
    assert isinstance(image, TiffImageFile)
    if image.width * image.height * count > MAX_PIXELS:
        raise DecodeError(
            f"{count} pages of {image.width} x {image.height} pixels are more than {MAX_PIXELS}, the most "
            "allowed"
        )
    planes: list[NDArray[Any]] = []
    begin = 0  # of the tags of a page
    for page in range(count):
        image.seek(page)
        if (
            page and image.tag_v2.next == begin
        ):  # of tags that are cut off Pillow keeps those of the page before
            raise DecodeError(f"the tags of its page {page + 1} are cut off")
        begin = image.tag_v2.next
        tiff.require_readable(image.tag_v2)
        if image.mode not in _GREY:
            raise UnsupportedImage(
                f"its page {page + 1} is not grey: {tiff.Kind(image.tag_v2).name}"
            )
        plane = _plane(image)
        if planes and (plane.shape, plane.dtype) != (planes[0].shape, planes[0].dtype):
            raise DecodeError(
                f"its page {page + 1} has {_words(plane)}, and the first one {_words(planes[0])}"
            )
        planes.append(plane)
    return np.stack(planes, axis=2)


def _plane(image: TiffImageFile) -> NDArray[Any]:
    if is_wide(image):
        return wide_levels(lambda: image)[:, :, 0]
    return np.asarray(image.convert("L"))


def _words(plane: NDArray[Any]) -> str:
    return f"{plane.shape[1]} x {plane.shape[0]} pixels of {8 * plane.itemsize} bits"
