"""Progressive resizing: train on small images first, and on images of full size at the end.

渐进式放大：先用小图训练，最后再用原尺寸的图像。

Source: Howard, "Training Imagenet in 3 hours for $25" (fast.ai, 2018); Tan and Le, "EfficientNetV2", ICML
2021, section 4 (arXiv:2104.00298). The phases are those of MosaicML's recipes for ImageNet: larger over the
middle 40 % of the steps.

Not for networks that take one size only (most vision transformers), nor for targets that have places: masks,
boxes, points.
"""

import torch
from torch import Tensor


def image_side(
    step: int,
    total_steps: int,
    *,
    start: int,
    end: int,
    small_until: float = 0.3,
    full_from: float = 0.7,
    multiple: int = 32,
) -> int:
    """The side of the training images of a step, pixels: `start`, then linearly more, then `end`.

    Step 0 already has `end`, so that what does not fit into memory shows at the beginning, and not after
    hours.

    Args:
        step: optimizer steps done before it, from 0.
        total_steps: of the training, at least 1.
        start, end: sides at the beginning and at the end, 1 <= start <= end.
        small_until, full_from: shares of the steps, 0 <= small_until <= full_from <= 1.
        multiple: sides between them are rounded to it, as each size costs a compiled or captured graph and
            networks halve images several times.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> [image_side(step, 10, start=64, end=128) for step in range(10)]
        [128, 64, 64, 64, 64, 96, 128, 128, 128, 128]
    """
    if step < 0 or total_steps < 1:
        raise ValueError(f"step must be at least 0 and total_steps 1, got {step} and {total_steps}")
    if not 1 <= start <= end:
        raise ValueError(f"sides must be 1 <= start <= end, got {start} and {end}")
    if not 0 <= small_until <= full_from <= 1:
        raise ValueError(
            f"shares must be 0 <= small_until <= full_from <= 1, got {small_until} and {full_from}"
        )
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    share = step / total_steps
    if step == 0 or share >= full_from:
        return end
    if share <= small_until:
        return start
    side = start + (end - start) * (share - small_until) / (full_from - small_until)
    return min(max(round(side / multiple) * multiple, start), end)


def resize_images(x_NCHW: Tensor, side: int) -> Tensor:
    """Square images in another size, bilinear with antialiasing; as they are if they have it.

    Args:
        x_NCHW: (N, C, S, S) floating-point.
        side: pixels, at least 1.

    Returns:
        (N, C, side, side), same dtype, device and memory format.

    Raises:
        ValueError: images that are not square, or a side below 1.
        TypeError: integers.

    Example:
        >>> resize_images(torch.ones(2, 3, 8, 8), 4).shape
        torch.Size([2, 3, 4, 4])
    """
    if x_NCHW.dim() != 4 or x_NCHW.shape[2] != x_NCHW.shape[3]:
        raise ValueError(f"images must be (N, C, S, S), got {tuple(x_NCHW.shape)}")
    if not x_NCHW.is_floating_point():
        raise TypeError(f"images must be floating-point, got {x_NCHW.dtype}: normalize them first")
    if side < 1:
        raise ValueError(f"side must be at least 1, got {side}")
    if x_NCHW.shape[2] == side:
        return x_NCHW
    x = x_NCHW if x_NCHW.element_size() > 2 else x_NCHW.float()  # torch has no half ones on a CPU
    small = torch.nn.functional.interpolate(x, (side, side), mode="bilinear", antialias=True)
    return small.to(x_NCHW.dtype)
