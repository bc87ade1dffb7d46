"""Geometric transforms of one image, with the results of torchvision's functions of the same names.

Source: the definitions of torchvision 0.29, transforms.v2.functional on uint8 tensors, as formulas.

Pillow samples by nearest neighbour in fixed point with 16 bits of fraction: a position within a hundredth of
a pixel of the border between two pixels may get the other pixel than on torchvision's tensors.

All functions take pixels (H, W, C) uint8 or float32 of any C; results are contiguous, and the input never
changes.
H: height, W: width, C: channels.
"""

from collections.abc import Callable

import numpy as np
from PIL import Image

from flambeau.images.channels import to_image
from flambeau.images.pixels import Pixels


def shear_x(pixels: Pixels, amount: float) -> Pixels:
    """Each row is moved to the left by `amount` times its distance from the top, with black borders."""
    return _transformed(pixels, (1, amount, 0, 0, 1, 0))


def shear_y(pixels: Pixels, amount: float) -> Pixels:
    """Each column is moved up by `amount` times its distance from the left, with black borders."""
    return _transformed(pixels, (1, 0, 0, amount, 1, 0))


def translate_x(pixels: Pixels, shift: int) -> Pixels:
    """Moved to the right by `shift` pixels (to the left if negative), with black borders."""
    return _moved(pixels, 0, shift)


def translate_y(pixels: Pixels, shift: int) -> Pixels:
    """Moved down by `shift` pixels (up if negative), with black borders."""
    return _moved(pixels, shift, 0)


def rotate(pixels: Pixels, degrees: float) -> Pixels:
    """Turned counter-clockwise about the center in the same size, with black borders."""
    return _changed(pixels, lambda image: image.rotate(degrees))


def _moved(pixels: Pixels, down: int, right: int) -> Pixels:
    result = np.zeros_like(pixels, order="C")
    (height, width) = pixels.shape[:2]
    if abs(down) < height and abs(right) < width:
        result[max(0, down) : height + min(0, down), max(0, right) : width + min(0, right)] = (
            pixels[max(0, -down) : height - max(0, down), max(0, -right) : width - max(0, right)]
        )
    return result


def _transformed(pixels: Pixels, matrix: tuple[float, ...]) -> Pixels:
    """Pixel (x, y) taken from (a x + b y + c, d x + e y + f)."""
    affine = Image.Transform.AFFINE
    return _changed(pixels, lambda image: image.transform(image.size, affine, matrix))


def _changed(pixels: Pixels, change: Callable[[Image.Image], Image.Image]) -> Pixels:
    """Pixels changed by Pillow, plane by plane where it has no color of such."""
    if pixels.dtype == np.uint8 and pixels.shape[2] in (1, 3):
        return np.array(change(to_image(pixels))).reshape(pixels.shape)
    planes = np.split(pixels, pixels.shape[2], axis=2)
    return np.stack([np.asarray(change(to_image(plane))) for plane in planes], axis=2)
