"""The mask of a training crop, or of an evaluation, at the same place as its image; by nearest neighbour.

Source: the definition of torch's `interpolate(mode="nearest")`: position k of n comes from floor(k * m / n)
of m, in float32.

H: height, W: width, S: side of the result.
"""

import numpy as np
from numpy.typing import NDArray

from flambeau.data.transforms.crops import TrainingCrop
from flambeau.images.native import kernel as native
from flambeau.images.pixels import Box

Mask = NDArray[np.uint8]


def train_mask(mask: Mask, seed: int, out: Mask, *, crop: TrainingCrop) -> None:
    """Fill `out`, (S, S), with what `train_image` shows of the image of this mask, which has its size."""
    box = crop.box(mask.shape[0], mask.shape[1], seed)
    fill_nearest(mask, box, out, mirror=crop.mirrors(seed))


def eval_mask(mask: Mask, out: Mask) -> None:
    """Fill `out`, (S, S), with the whole mask, as `eval_image` does with `resize="squash"`."""
    fill_nearest(mask, (0, 0, *mask.shape), out)


def fill_nearest(mask: Mask, box: Box, out: Mask, *, mirror: bool = False) -> None:
    """Fill `out` with a part of a mask in another size."""
    top, left, height, width = box
    rows = top + nearest(height, out.shape[0])
    columns = left + nearest(width, out.shape[1])
    if mirror:
        columns = columns[::-1]
    kernel = native.kernel()
    if kernel is not None and mask.strides[1] == 1 and out.flags.c_contiguous:
        kernel.nearest(mask, rows.astype(np.int32), columns.astype(np.int32, order="C"), out)
        return
    # Whole rows are copied, which is fast, and columns gathered, of as few rows as possible.
    if height < len(rows):
        part = np.take(mask[top : top + height], columns, axis=1, mode="clip")
        np.take(part, rows - top, axis=0, out=out, mode="clip")
    else:
        np.take(mask[rows], columns, axis=1, out=out, mode="clip")


def nearest(length: int, size: int) -> NDArray[np.int64]:
    """Which of `length` positions each of `size` comes from."""
    scale = np.float32(length) / np.float32(size)
    positions = np.floor(np.arange(size, dtype=np.float32) * scale).astype(np.int64)
    result: NDArray[np.int64] = np.minimum(positions, length - 1)
    return result
