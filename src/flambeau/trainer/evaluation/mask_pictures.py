"""Pictures of masks: colors of classes, a mask over its image, small ones for a report.

N: images, H: height, W: width.
"""

import base64
import io
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from flambeau.data.sources.masks.mask_file import IGNORED

_SIDE = 64  # of a predicted mask in a report, pixels
_OPACITY = 0.55  # of a mask over its image; by eye


def palette() -> NDArray[np.uint8]:
    """(256, 3) colors of Pascal VOC's masks: a number's bits spread over red, green and blue."""
    numbers = np.arange(256)
    colors = np.zeros((256, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colors[:, channel] |= ((numbers >> (3 * bit + channel) & 1) << (7 - bit)).astype(
                np.uint8
            )
    return colors


def mask_image(mask: NDArray[np.uint8]) -> Image.Image:
    """A mask (H, W) as a picture with a palette, whose indices are its numbers."""
    image = Image.fromarray(mask)
    image.putpalette(palette().tobytes())
    return image


def overlay(image: NDArray[np.uint8], mask: NDArray[np.uint8]) -> Image.Image:
    """A mask's colors (H, W) over an image, except pixels of number 0 and IGNORED."""
    colors = palette()[mask].astype(np.float32)
    wide = np.broadcast_to(image, (*mask.shape, 3)).astype(np.float32)
    is_shown = ((mask != 0) & (mask != IGNORED))[:, :, None]
    mixed = np.where(is_shown, (1 - _OPACITY) * wide + _OPACITY * colors, wide)
    return Image.fromarray(mixed.round().astype(np.uint8))


def mask_picture(image: Tensor, mask: Tensor, predicted: NDArray[np.uint8] | None) -> Tensor:
    """A mask over its image, and any predicted one beside it, (3, S, S) or (3, S, 2 S)."""
    x = image if image.dtype == torch.uint8 else (image.clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = x.permute(1, 2, 0).numpy()
    shown = [np.asarray(overlay(pixels, mask.numpy()))]
    if predicted is not None:
        size = mask.shape[1], mask.shape[0]
        large = np.asarray(Image.fromarray(predicted).resize(size, Image.Resampling.NEAREST))
        shown.append(np.asarray(overlay(pixels, large)))
    return torch.from_numpy(np.concatenate(shown, axis=1)).permute(2, 0, 1)


def shown_mask(predicted: Tensor) -> Tensor:
    """(N, 64, 64) uint8 of (N, S, S) classes, by nearest neighbour."""
    small = F.interpolate(predicted[:, None].float(), (_SIDE, _SIDE), mode="nearest")
    return small[:, 0].to(torch.uint8)


def encoded_mask(mask: Tensor) -> str:
    """A small mask as text: a PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(mask.numpy()).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def decoded_text(text: Any) -> NDArray[np.uint8] | None:
    """The inverse of `encoded_mask`; None if it is none."""
    try:
        content = base64.b64decode(text, validate=True)
        with Image.open(io.BytesIO(content), formats=("PNG",)) as image:
            is_small = image.size == (_SIDE, _SIDE) and image.mode == "L"
            return np.asarray(image) if is_small else None
    except Exception:  # Pillow has no common one
        return None
