"""Whether two images that look alike when they are small also agree in what only their full size shows.

Blocks of the smaller image are searched in the other one near the place where they should be, and compared by
their covariance after the coarse picture has been subtracted.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flambeau.data.check.image_facts import STEPS, full_levels, shown_pixels
from flambeau.data.check.near_copies import NearPair
from flambeau.data.sources.source import Source, pixel_kind, stacked_channels
from flambeau.errors import DecodeError, InputError
from flambeau.images.thread_pool import DecodePool

# All numbers here were chosen on photographs; bench/near_duplicates.py measures their effect.
_COARSE = 24  # cells per side of the picture that is subtracted: the small pictures have shown it
_BLOCK, _BLOCKS = 64, 3  # pixels per side of a block; blocks per side of an image, at most
_PLAIN = 2.0  # levels: with less detail than this there is nothing to compare
_AGREE = 0.35  # covariance of the detail, of its mean variance; other textures have about 0


def with_equal_detail(
    source: Source, pairs: Sequence[NearPair], *, threads: int | None = None
) -> list[NearPair]:
    """The pairs whose images agree at full size; an unreadable image agrees with none."""
    agrees = [False] * len(pairs)
    kind = pixel_kind(source)
    stacked = stacked_channels(source)

    @functools.lru_cache(maxsize=16)
    def image(number: int) -> Image.Image:
        return Image.fromarray(full_levels(shown_pixels(source.read(number), stacked), kind))

    def compare(position: int) -> None:
        pair = pairs[position]
        try:
            agrees[position] = detail_agrees(image(pair.first), image(pair.second), pair)
        except (OSError, DecodeError, InputError, MemoryError):
            return

    DecodePool(threads).each(len(pairs), compare)
    return [pair for pair, is_same in zip(pairs, agrees, strict=True) if is_same]


def detail_agrees(first: Image.Image, second: Image.Image, pair: NearPair) -> bool:
    """Whether `second` shows the part of `first` that the pair says; both are RGB."""
    top, bottom, left, right = (cut / STEPS for cut in pair.cuts)
    box = (
        left * first.width,
        top * first.height,
        (1 - right) * first.width,
        (1 - bottom) * first.height,
    )
    if pair.is_mirrored:
        second = second.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    size = (
        max(1, min(round(box[2] - box[0]), second.width)),
        max(1, min(round(box[3] - box[1]), second.height)),
    )
    one, other = _detail(first, size, box), _detail(second, size, None)
    if max(float(one.std()), float(other.std())) < _PLAIN:
        return True
    # A cut is known to half a step; a whole picture of another size may be half a pixel off.
    reach = math.ceil(max(size) / STEPS) if any(pair.cuts) else int(first.size != second.size)
    return _agreement(one, other, reach) >= _AGREE


def _detail(
    image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float] | None
) -> Tensor:
    """(3, H, W) levels of a part without its coarse picture."""
    part = image.resize(size, Image.Resampling.LANCZOS, box=box)
    coarse = part.resize((_COARSE, _COARSE), Image.Resampling.BOX)
    smooth = coarse.resize(size, Image.Resampling.BILINEAR)
    levels = np.asarray(part, np.float32) - np.asarray(smooth, np.float32)
    return torch.from_numpy(levels).permute(2, 0, 1)


def _agreement(one: Tensor, other: Tensor, reach: int) -> float:
    """Covariance of two details of one size, at the best shift of each block, over their mean variance."""
    height, width = one.shape[1:]
    reach = min(reach, (height - 1) // 4, (width - 1) // 4)
    tall, wide = min(_BLOCK, height - 2 * reach), min(_BLOCK, width - 2 * reach)
    shared = variance = 0.0
    for row in _starts(height, tall, reach):
        for column in _starts(width, wide, reach):
            block = other[:, row : row + tall, column : column + wide]
            around = one[
                :,
                row - reach : row + tall + reach,
                column - reach : column + wide + reach,
            ]
            products, squares = _products(around, block)
            mean = (squares + block.square().sum()) / 2
            best = int((products / mean.clamp(min=1e-6)).argmax())
            shared += float(products.flatten()[best])
            variance += float(mean.flatten()[best])
    return shared / max(variance, 1e-6)


def _products(around: Tensor, block: Tensor) -> tuple[Tensor, Tensor]:
    """At each position of the block in what is around it: the sums of their product and of the square."""
    size = around.shape[1:]
    tall, wide = block.shape[1:]
    spectra = torch.fft.rfft2(around) * torch.fft.rfft2(block, s=size).conj()
    products = torch.fft.irfft2(spectra.sum(0), s=size)
    sums = (
        torch.nn.functional.pad(around.double().square().sum(0), (1, 0, 1, 0)).cumsum(0).cumsum(1)
    )
    squares = sums[tall:, wide:] - sums[:-tall, wide:] - sums[tall:, :-wide] + sums[:-tall, :-wide]
    return products[: len(squares), : squares.shape[1]], squares


def _starts(length: int, block: int, reach: int) -> list[int]:
    """Where the blocks of an axis begin: evenly spread, `reach` away from both ends."""
    last = length - reach - block
    count = min(_BLOCKS, max(1, (last - reach) // block + 1))
    return [reach + round(k * (last - reach) / max(1, count - 1)) for k in range(count)]
