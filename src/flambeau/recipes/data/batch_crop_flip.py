"""Shift, flip and cutout for a whole batch on its device, each sample by its 64-bit seed.

在设备上对整个批次做平移裁剪、水平翻转与 cutout，每个样本只由自己的 64 位种子决定。

Source: crop with padding and flip: He et al., "Deep residual learning", CVPR 2016, section 4.2; cutout:
DeVries and Taylor, 2017, section 3 (arXiv:1708.04552); the hash is SplitMix64's finalizer (Steele, Lea and
Flood, OOPSLA 2014).

Not for photographs, whose crops differ in size, nor for digits and text with `flip`. Not for evaluation.
"""

from typing import Literal

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# Numbers of the random streams of a sample.
_FLIP, _SHIFT_DOWN, _SHIFT_RIGHT, _CUT_ROW, _CUT_COLUMN = 1, 2, 3, 1000, 1001


def batch_crop_flip(
    x_NCHW: Tensor,
    seeds: Tensor,
    *,
    padding: int,
    border: Literal["reflect", "constant"] = "reflect",
    flip: bool | Literal["alternate"] = True,
    cutout: int = 0,
    value: float | Tensor = 0.0,
) -> Tensor:
    """Pad and crop images at random, flip half of them, and cut out a square.

    A sample's result depends only on its pixels and its seed. Nothing waits for the device.

    Args:
        x_NCHW: (N, C, H, W), any dtype; uint8 before normalization moves the fewest bytes.
        seeds: (N,) int64 on the images' device, one per sample and epoch, as from `sample_seeds`.
        padding: largest shift in pixels, at least 0 and below H and W; usually 4 for 32 x 32.
        border: what a shift shows: 'reflect' the image, or 'constant' `value`.
        flip: mirror half of the images; 'alternate': those whose seed is negative (`alternating_seeds`).
            False if left and right matter.
        cutout: side in pixels of the square set to `value`, 0 for none; its center is uniform, and it is
            clipped at the border. In the paper 16 for CIFAR-10, 8 for CIFAR-100.
        value: a number, or a 0-d or (C,) tensor on the device; in the paper the data's mean, 0 after
            normalization.

    Returns:
        (N, C, H, W), same dtype and device, channels_last.

    Raises:
        TypeError: seeds are not int64.
        ValueError: shapes or devices that do not fit, a setting out of range.

    Example:
        >>> x = torch.arange(2 * 16, dtype=torch.uint8).view(2, 1, 4, 4)
        >>> both = batch_crop_flip(x, torch.tensor([5, 6]), padding=1)
        >>> torch.equal(both[1:], batch_crop_flip(x[1:], torch.tensor([6]), padding=1))
        True
    """
    _check(x_NCHW, seeds, padding, border, cutout, flip)
    (num_images, _, height, width), device = x_NCHW.shape, x_NCHW.device
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    from_rows = rows + _integers(seeds, _SHIFT_DOWN, 2 * padding + 1)[:, None] - padding
    from_columns = columns + _integers(seeds, _SHIFT_RIGHT, 2 * padding + 1)[:, None] - padding
    if flip:
        turned = (seeds < 0 if flip == "alternate" else _integers(seeds, _FLIP, 2) == 1)[:, None]
        from_columns = torch.where(turned, from_columns.flip(1), from_columns)
    outside = torch.zeros((), dtype=torch.bool, device=device)
    if border == "constant" and padding:
        outside = _outside(from_rows, height)[:, :, None] | _outside(from_columns, width)[:, None]
    if cutout:
        cut = _near(rows, _integers(seeds, _CUT_ROW, height), cutout)[:, :, None]
        outside = (
            outside | cut & _near(columns, _integers(seeds, _CUT_COLUMN, width), cutout)[:, None]
        )
    images = torch.arange(num_images, device=device)[:, None, None]
    from_rows, from_columns = _mirrored(from_rows, height), _mirrored(from_columns, width)
    x_NHWC = x_NCHW.permute(0, 2, 3, 1)[images, from_rows[:, :, None], from_columns[:, None]]
    if outside.dim():
        x_NHWC = torch.where(outside[..., None], _like(value, x_NCHW), x_NHWC)
    return x_NHWC.permute(0, 3, 1, 2)


def _check(
    x_NCHW: Tensor, seeds: Tensor, padding: int, border: str, cutout: int, flip: object
) -> None:
    if x_NCHW.dim() != 4:
        raise ValueError(f"images must be (N, C, H, W), got {tuple(x_NCHW.shape)}")
    if seeds.dtype != torch.int64:
        raise TypeError(f"seeds must be int64, got {seeds.dtype}")
    if seeds.shape != x_NCHW.shape[:1]:
        raise ValueError(f"seeds must have shape ({len(x_NCHW)},), got {tuple(seeds.shape)}")
    if seeds.device != x_NCHW.device:
        raise ValueError(f"seeds are on {seeds.device}, the images on {x_NCHW.device}: move them")
    shorter = min(x_NCHW.shape[2:])
    if not 0 <= padding < shorter:
        raise ValueError(f"padding must be in 0 .. {shorter - 1}, got {padding}")
    if flip not in (True, False, "alternate"):
        raise ValueError(f"flip must be True, False or 'alternate', got {flip!r}")
    if border not in ("reflect", "constant"):
        raise ValueError(f"border must be 'reflect' or 'constant', got {border!r}")
    if cutout < 0:
        raise ValueError(f"cutout must be at least 0, got {cutout}")


def _integers(seeds: Tensor, stream: int, below: int) -> Tensor:
    """One number per sample in [0, below), different for each stream."""
    start = _mix(_mix(stream) ^ _GAMMA)
    bits = (seeds + 1) * _signed(_GAMMA) + _signed(start)  # wraps modulo 2**64, as it should
    bits = (bits ^ _shift(bits, 30)) * _signed(_MIX_1)
    bits = (bits ^ _shift(bits, 27)) * _signed(_MIX_2)
    # 53 bits for a small range: the bias of the remainder is below 1e-13.
    return _shift(bits ^ _shift(bits, 31), 11) % below


def _mix(value: int) -> int:
    """SplitMix64's finalizer, which `_integers` computes for tensors."""
    value = (value ^ value >> 30) * _MIX_1 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * _MIX_2 & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def _shift(bits: Tensor, by: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift.
    return bits >> by & (1 << 64 - by) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mirrored(positions: Tensor, length: int) -> Tensor:
    return (length - 1) - ((length - 1) - positions.abs()).abs()


def _outside(positions: Tensor, length: int) -> Tensor:
    return (positions < 0) | (positions >= length)


def _near(positions: Tensor, centers: Tensor, side: int) -> Tensor:
    start = (centers - side // 2)[:, None]
    return (positions >= start) & (positions < start + side)


def _like(value: float | Tensor, x: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(x.dtype)
    return torch.full((), value, dtype=x.dtype, device=x.device)  # not torch.tensor: it would wait
