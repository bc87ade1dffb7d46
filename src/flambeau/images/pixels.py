"""The types of decoded images and of a part of one, and the largest that are read."""

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
