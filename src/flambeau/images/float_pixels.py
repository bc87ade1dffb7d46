"""Floating-point pixels k / 255, as torchvision's ToTensor makes them, converted back to the integers k.

Not for pixels that were normalized or computed: these are refused, never rounded.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def float_to_uint8(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """The 8-bit pixels from which floating-point ones were made, exactly.

    Normalized pixels have no known brightness, and rounding computed ones would lose information.

    Args:
        pixels: of any shape, float16 or wider.

    Raises:
        ValueError: a pixel is not k / 255 with k from 0 to 255, such as NaN.

    Example:
        >>> float_to_uint8(np.float32([0, 51, 255]) / 255).tolist()
        [0, 51, 255]
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
