"""The types of decoded images, and of a part of one."""

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
"""(H, W, C), C 1 for grey or 3 for RGB."""

Box = tuple[int, int, int, int]
"""Top, left, height and width of a part of an image, in pixels."""
