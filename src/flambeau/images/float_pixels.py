"""Floating-point pixels k / 255, as torchvision's ToTensor makes them, back to the k they were made of.

Source: own. Not for pixels that were normalized or computed: these are refused, never rounded.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def float_to_uint8(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """The 8-bit pixels that floating-point ones were made of, exactly.

    What has been normalized has no known brightness, and rounding what was computed would lose what the user
    wanted to keep.

    Args:
        pixels: of any shape, float16 or wider.

    Returns:
        uint8 of the same shape, contiguous.

    Raises:
        ValueError: a pixel is no k / 255 with k from 0 to 255; NaN is none.

    Example:
        >>> float_to_uint8(np.float32([0, 51, 255]) / 255).tolist()
        [0, 51, 255]
    """
    scaled = pixels.astype(np.float64) * 255
    levels = np.rint(scaled)
    # float16 is 255 * 2**-12 off at most; a thousandth is far above float32's error and hit by chance rarely.
    tolerance = max(1e-3, 255 * float(np.finfo(pixels.dtype).eps))
    if not ((levels >= 0) & (levels <= 255) & (abs(scaled - levels) <= tolerance)).all():
        raise ValueError(
            f"floating-point pixels {scaled.min() / 255:.4g} .. {scaled.max() / 255:.4g} are not all k / 255"
        )
    return np.ascontiguousarray(levels.astype(np.uint8))
