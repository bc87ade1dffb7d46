"""Color transforms of one image, with the results of torchvision's functions of the same names.

Source: the definitions of torchvision 0.29, transforms.v2.functional on uint8 tensors, as formulas: blends of
Haeberli and Voorhies, "Image processing by interpolation and extrapolation", IRIS Universe 28, 1994;
histogram equalisation and autocontrast as Pillow's ImageOps; color jitter: torchvision's ColorJitter.

Everything is integer arithmetic or single float32 operations, never fused ones or sums that round, so that
pixels do not depend on the instruction set; for the same reason a level may differ by one from torchvision's
if the exact value is a whole number. The C kernel, if there is one, computes blends and hue, with the same
pixels.

torchvision's own functions on PIL images are slower: an augmented image (decoded, cropped to 224 x 224, and
converted to an array) takes 12 % more time with trivialaugment, 12 % with randaugment and 26 % with color
jitter of 0.4: `taskset -c 1 python bench/color_operations.py --data DIR --rounds 11`, medians on one core of
an Intel Xeon. Their pixels also differ from those of the functions on tensors, which are the model here.

All functions take pixels (H, W, C) uint8, C 1 or 3; results are contiguous, and the input never changes.
Brightness, contrast, saturation and sharpness also take levels 0 .. 65535 of 16 bits, as float32, of which
nothing is rounded. The other functions need a level of white, which is unknown there: 12 bits in files of 16.
H: height, W: width, C: channels.
"""

import functools
import itertools
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.images.channels import to_image
from flambeau.images.native.kernel import kernel
from flambeau.images.pixels import Pixels
from flambeau.recipes.data.sample_order import mix

Floats = NDArray[np.float32]
_WHITE_OF_16_BITS = np.float32(65535)

# Luma of ITU-R 601 as in torchvision (the weights add up to 0.9999), times 10,000: sums are integers that
# float32 holds exactly.
_LUMA = (2989, 5870, 1140)

# The first of five random streams: the order of the operations, and their four factors.
_JITTER = 1000
_ORDERS = list(itertools.permutations(range(4)))
_mixed = functools.cache(mix)  # for the few numbers of draws: saves a third of the time of a draw
_mixed_seed = functools.lru_cache(maxsize=64)(
    mix
)  # the draws of a sample share it; some per thread


def color_jitter(
    pixels: Pixels,
    seed: int,
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
) -> Pixels:
    """Random changes of brightness, contrast, saturation and hue, in random order.

    Args:
        brightness, contrast, saturation: at least 0; the factor is uniform in [max(0, 1 - x), 1 + x].
        hue: in [0, 0.5]; the turn is uniform in [-hue, hue] of the whole circle.
    """
    strengths = (brightness, contrast, saturation, hue)
    if min(strengths) < 0 or hue > 0.5:
        raise ValueError(
            f"brightness, contrast, saturation must be at least 0, hue in [0, 0.5], got {strengths}"
        )
    steps = (adjust_brightness, adjust_contrast, adjust_saturation, adjust_hue)
    for step in _ORDERS[int(uniform(seed, _JITTER) * len(_ORDERS))]:
        strength = strengths[step]
        low = max(0.0, 1.0 - strength)
        high = 1.0 + strength
        if steps[step] is adjust_hue:
            low = -strength
            high = strength
        if strength:
            pixels = steps[step](pixels, low + (high - low) * uniform(seed, _JITTER + 1 + step))
    return np.ascontiguousarray(pixels)


def uniform(seed: int, draw: int) -> float:
    """Number `draw` of a sample's random numbers, uniform in [0, 1)."""
    return (mix(_mixed_seed(seed) ^ _mixed(draw)) >> 11) * 2.0**-53


def adjust_brightness(pixels: Pixels, factor: float) -> Pixels:
    """Every level times `factor`, at least 0: 0 is black, 1 changes nothing."""
    _check_factor(factor)
    return _blend(pixels, np.float32(0), factor)


def adjust_contrast(pixels: Pixels, factor: float) -> Pixels:
    """Distances to the image's mean grey times `factor`, at least 0: 0 is flat grey, 1 changes nothing."""
    _check_factor(factor)
    grey = pixels if pixels.shape[2] == 1 else _luma(pixels)
    # To double precision: torchvision's float32 sum differs in the sixth digit.
    return _blend(pixels, np.float32(grey.mean(dtype=np.float64)), factor)


def adjust_saturation(pixels: Pixels, factor: float) -> Pixels:
    """Distances of each pixel to its grey times `factor`, at least 0: 0 is grey, 1 changes nothing."""
    _check_factor(factor)
    if pixels.shape[2] == 1:
        return np.ascontiguousarray(pixels)
    return _blend(pixels, _luma(pixels), factor)


def adjust_hue(pixels: Pixels, turn: float) -> Pixels:
    """Hue turned by `turn` of the circle, in [-0.5, 0.5]; lightness and saturation (HSV) stay."""
    if not -0.5 <= turn <= 0.5:
        raise ValueError(f"turn must be in [-0.5, 0.5], got {turn}")
    if pixels.shape[2] == 1:
        return np.ascontiguousarray(pixels)
    turns = np.array([turn - channel / 3 for channel in range(3)], np.float32)
    if (native := kernel()) is not None:
        return native.turn_hue(np.ascontiguousarray(pixels), turns)
    red, green, blue = _floats(pixels.transpose(2, 0, 1))
    top = np.maximum(np.maximum(red, green), blue)
    chroma = top - np.minimum(np.minimum(red, green), blue)
    # The angle as a fraction of the circle: red at 0, green at 1/3, blue at 2/3, with the other two colors to
    # the sides of the top one.
    scale = np.float32(1 / 6) / np.maximum(chroma, np.float32(1))
    angle = np.where(
        top == red,
        (green - blue) * scale,
        np.where(
            top == green,
            (blue - red) * scale + np.float32(1 / 3),
            (red - green) * scale + np.float32(2 / 3),
        ),
    )
    result = np.empty(pixels.shape, np.uint8)
    for channel in range(3):
        # A channel is at the top up to a sixth from its own angle, at the bottom beyond two sixths from it.
        away = angle + turns[channel]
        away -= np.rint(away)
        below = np.clip(np.abs(away) * np.float32(6) - np.float32(1), np.float32(0), np.float32(1))
        # As torchvision makes levels of [0, 1]: 255.999 x, without the fraction.
        level = (top - chroma * below) * np.float32(255.999 / 255)
        np.copyto(result[:, :, channel], level, casting="unsafe")
    return result


def adjust_sharpness(pixels: Pixels, factor: float) -> Pixels:
    """Distances to a smoothed image times `factor`, at least 0: 0 is smooth, 1 changes nothing.

    The filter is 3 x 3 with 5 in the middle and 1 around; the outermost pixels do not change.
    """
    _check_factor(factor)
    height, width, channels = pixels.shape
    is_wide = pixels.dtype == np.float32
    sums: Any = np.float32 if is_wide else np.int16
    # Rows as in memory: the neighbour to the right is `channels` levels further.
    rows = pixels.reshape(height, width * channels).astype(sums)
    inner = rows[1:-1, channels:-channels]
    total = rows[:-2] + rows[1:-1] + rows[2:]
    total = total[:, : -2 * channels] + total[:, channels:-channels] + total[:, 2 * channels :]
    total += inner * sums(4)
    # Of 8 bits rounded to nearest; thirteenths have no ties.
    smooth = total / sums(13) if is_wide else (total * sums(2) + sums(13)) // sums(26)
    values = _floats(smooth - inner)
    values *= np.float32(1 - factor)
    values += inner
    result = pixels.reshape(height, width * channels).copy()
    result[1:-1, channels:-channels] = _within(values) if is_wide else _levels(values)
    return result.reshape(pixels.shape)


def posterize(pixels: Pixels, bits: int) -> Pixels:
    """Only the highest `bits` bits of each level, 0 to 8."""
    if not 0 <= bits <= 8:
        raise ValueError(f"bits must be in 0 .. 8, got {bits}")
    return np.bitwise_and(pixels, np.uint8(256 - (1 << 8 - bits)), order="C")


def solarize(pixels: Pixels, threshold: float) -> Pixels:
    """Levels from `threshold` on, at most 255, inverted."""
    if threshold > 255:
        raise ValueError(f"threshold must be at most 255, got {threshold}")
    above = pixels >= np.uint8(max(0, math.ceil(threshold)))
    return np.bitwise_xor(pixels, np.multiply(above, np.uint8(255)), order="C")


def autocontrast(pixels: Pixels) -> Pixels:
    """Each channel stretched so that its darkest level becomes 0 and its brightest 255.

    Mostly 254, as in torchvision: float32 falls short. A channel of one level does not change.
    """
    height, width, channels = pixels.shape
    rows = pixels.reshape(height, width * channels)
    low, high = (
        ends(ends(rows, axis=0).reshape(width, channels), axis=0).astype(np.float32)
        for ends in (np.min, np.max)
    )
    flat = low == high
    low, scale = np.where(flat, np.float32(0), low), (high - low) * np.float32(1 / 255)
    scale[flat] = 1
    # One row of each, so that the inner loops are as long as a row.
    values = _floats(rows)
    values -= np.tile(low, width)
    values /= np.tile(scale, width)
    return _levels(values).reshape(pixels.shape)


def equalize(pixels: Pixels) -> Pixels:
    """Each channel's levels are spread so that all ranges of levels are about equally frequent."""
    image = to_image(pixels)
    counts = np.reshape(image.histogram(), (-1, 256))
    changed = image.point([level for row in counts for level in _equalizing(row)])
    return np.array(changed).reshape(pixels.shape)


def invert(pixels: Pixels) -> Pixels:
    """255 minus each level."""
    return np.invert(pixels, order="C")


def _check_factor(factor: float) -> None:
    if not factor >= 0:
        raise ValueError(f"factor must be at least 0, got {factor}")


def _floats(values: NDArray[Any]) -> Floats:
    return values.astype(np.float32, order="C")


def _levels(values: Floats) -> Pixels:
    """Clipped and truncated to levels; overwrites `values`."""
    return np.clip(values, np.float32(0), np.float32(255), out=values).astype(np.uint8)


def _within(values: Floats) -> Any:
    """Clipped to levels of 16 bits; overwrites `values`."""
    return np.clip(values, np.float32(0), _WHITE_OF_16_BITS, out=values)


def _blend(pixels: Pixels, other: Pixels | np.float32, factor: float) -> Pixels:
    """`factor` of the pixels, and 1 - factor of a level: one for all, or one per pixel, (H, W)."""
    share = np.float32(factor)
    rest = np.float32(1 - factor)
    is_wide = pixels.dtype == np.float32
    native = kernel()
    if native is not None and not is_wide:
        return native.blend(np.ascontiguousarray(pixels), other, share, rest)
    values = _floats(pixels)
    values *= share
    values += other * rest if isinstance(other, np.float32) else _floats(other)[:, :, None] * rest
    return _within(values) if is_wide else _levels(values)


def _luma(pixels: Pixels) -> Pixels:
    """(H, W), the luma of each pixel, truncated to uint8; of 16 bits it is a fraction."""
    if pixels.dtype == np.float32:  # no product of matrices, whose sums depend on the processor
        red, green, blue = (pixels[:, :, c] * np.float32(_LUMA[c] * 1e-4) for c in range(3))
        total: Pixels = red + green + blue
        return total
    if (native := kernel()) is not None:
        return native.luma(np.ascontiguousarray(pixels))
    # Below 2**24: exact in any order of summation. Whole results stay whole: the error of 1e-4 is less than
    # half a unit in the last place.
    luma: Floats = _floats(pixels.reshape(-1, 3)) @ np.array(_LUMA, np.float32)
    luma *= np.float32(1e-4)
    return luma.astype(np.uint8).reshape(pixels.shape[:2])


def _equalizing(counts: NDArray[Any]) -> list[int]:
    """The new level for each level, from the share of pixels below it."""
    last = counts[counts.nonzero()[0][-1]]
    step = int(counts.sum() - last) // 255
    if not step:
        return list(range(256))
    below = np.concatenate([[0], counts.cumsum()[:-1]])
    return np.minimum((below + step // 2) // step, 255).tolist()  # type: ignore[no-any-return]
