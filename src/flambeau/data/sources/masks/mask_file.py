"""A mask: the number of a class for each pixel, from a file or an array.

H: height, W: width.
"""

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from flambeau.errors import DecodeError
from flambeau.images import png
from flambeau.images.pixels import MAX_PIXELS
from flambeau.images.stand_ins import stand_in

Mask = NDArray[np.uint8]
"""(H, W), contiguous."""
IGNORED = 255
"""In masks that a source gives: the pixel counts in no loss and no figure."""

_FORMATS = ("PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP")
_MOST_VALUE = 255


def decoded_mask(data: "bytes | NDArray[Any] | Image.Image") -> Mask:
    """The numbers in a mask, unchanged: the indices of a palette, or the levels of gray.

    Of a lossless file (PNG, GIF, BMP, TIFF, PPM, WebP), or whole numbers (H, W) or (H, W, 1). DecodeError:
    damaged, too large, in color, a JPEG, or numbers outside 0 .. 255.
    """
    if isinstance(data, np.ndarray):
        return _of_array(data)
    if isinstance(data, Image.Image):
        return _of_image(data)
    levels = png.indices(data)
    if levels is not None and levels.size <= MAX_PIXELS:
        return np.ascontiguousarray(levels)
    if data.startswith(b"\xff\xd8\xff"):
        raise DecodeError("a JPEG, which blurs the numbers of classes; save masks as PNG")
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            return _of_image(image)
    except DecodeError:
        raise
    except UnidentifiedImageError as error:
        other = stand_in(data)
        raise DecodeError(f"this is {other}" if other else "damaged, or no picture") from error
    except Exception as error:  # Pillow has no common one; see `images.decode`
        other = stand_in(data)
        why = f"this is {other}" if other else " ".join(str(error).split())[:200]
        raise DecodeError(why or type(error).__name__) from error


def require_same_size(mask: Mask, size: tuple[int, int], name: str = "") -> None:
    """Require a mask of the size (height, width) of its image, else DecodeError."""
    if mask.shape != size:
        height, width = mask.shape
        raise DecodeError(
            f"its mask {f'{name} ' * bool(name)}is {width} x {height}, and the image {size[1]} x {size[0]}"
        )


def _of_image(image: Image.Image) -> Mask:
    if image.width * image.height > MAX_PIXELS:
        raise DecodeError(
            f"{image.width} x {image.height} pixels are more than {MAX_PIXELS}, the most allowed"
        )
    if image.mode == "1":
        image = image.convert("L")
        return np.ascontiguousarray(np.asarray(image) > 0).view(np.uint8)
    if image.mode in ("L", "P"):
        return np.ascontiguousarray(image, np.uint8)
    if image.mode in ("I", "I;16", "I;16B", "F"):
        return _of_array(np.asarray(image))
    if image.mode == "LA":
        return np.ascontiguousarray(np.asarray(image)[:, :, 0])
    if image.mode in ("RGB", "RGBA"):
        pixels = np.asarray(image)
        if (pixels[:, :, :2] == pixels[:, :, 1:3]).all():
            return np.ascontiguousarray(pixels[:, :, 0])
        raise DecodeError(
            "a picture in color; a mask holds the number of a class in each pixel, as gray or with a palette"
        )
    raise DecodeError(f"pixels of Pillow's mode {image.mode}; a mask is gray or has a palette")


def _of_array(array: NDArray[Any]) -> Mask:
    if array.ndim == 3 and 1 in (array.shape[0], array.shape[2]):
        array = array.squeeze(0 if array.shape[0] == 1 else 2)
    if array.ndim != 2 or not array.size:
        raise DecodeError(f"a mask of shape {array.shape}: it is (H, W)")
    if array.dtype == np.bool_ or array.dtype == np.uint8:
        return np.ascontiguousarray(array).view(np.uint8)
    if array.dtype.kind not in "iuf":
        raise DecodeError(f"a mask of {array.dtype}: it holds whole numbers")
    # -1 is the number of pixels to ignore in some data sets.
    small = np.where(array == -1, _MOST_VALUE, array) if array.dtype.kind in "if" else array
    low = small.min()
    high = small.max()
    if not (low >= 0 and high <= _MOST_VALUE):  # NaN, too
        raise DecodeError(
            f"numbers from {low} to {high}: those of classes are in 0 .. {_MOST_VALUE}"
        )
    numbers = small.astype(np.uint8)
    if array.dtype.kind == "f" and (numbers != small).any():
        raise DecodeError("numbers with fractions; those of classes are whole")
    return np.ascontiguousarray(numbers)
