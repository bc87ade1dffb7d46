"""The types of decoded images and of a part of one, and the largest that are read."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""(H, W, C), C 1 for grey, 3 for RGB, or another number of channels that are no color."""

Box = tuple[int, int, int, int]
"""Top, left, height and width of a part of an image, in pixels."""

MAX_PIXELS = 178_956_970
"""Pillow calls more a 'decompression bomb' (half a GiB as RGB), and warns from half of it on."""

MAX_CHANNELS = 1024
"""Of an image whose channels are no color; the spectrometers of satellites have 200 to 450."""


def float_to_uint8(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """The 8-bit pixels from which floating-point ones were made, exactly.

    Normalized pixels have no known brightness, and rounding would lose information.

    Args:
        pixels: of any shape, float16 or wider.

    Raises:
        ValueError: a pixel is not k / 255 with k from 0 to 255, such as NaN.
    """
    scaled = pixels.astype(np.float64) * 255
    levels = np.rint(scaled)
    # float16 is off by 255 * 2**-12 at most; a thousandth is far above float32's error and rare by chance.
    tolerance = max(1e-3, 255 * float(np.finfo(pixels.dtype).eps))
    if not ((levels >= 0) & (levels <= 255) & (abs(scaled - levels) <= tolerance)).all():
        raise ValueError(
            f"floating-point pixels {scaled.min() / 255:.4g} .. {scaled.max() / 255:.4g} are not all k / 255"
        )
    return np.ascontiguousarray(levels.astype(np.uint8))
