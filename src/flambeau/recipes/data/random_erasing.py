"""Random erasing: overwrite a random rectangle in some images of a batch.

随机擦除：把批次中部分图像的一个随机矩形区域覆盖掉。

Source: Zhong et al., "Random erasing data augmentation", AAAI 2020, algorithm 1 (arXiv:1708.04896), with
the distribution of torchvision's RandomErasing; the hash is SplitMix64's finalizer (OOPSLA 2014).

Not for images with small objects, nor together with cutmix, which hides a rectangle too. Not for evaluation.
"""

import math
from typing import Literal

import torch
from torch import Tensor

_TRIES = 10  # as torchvision; an image that no try fits is not changed

_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)  # SplitMix64's constants, as int64
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def random_erasing(
    x_NCHW: Tensor,
    *,
    seeds: Tensor | None = None,
    generator: torch.Generator | None = None,
    probability: float = 0.5,
    scale: tuple[float, float] = (0.02, 0.33),
    ratio: tuple[float, float] = (0.3, 3.3),
    value: float | Tensor | Literal["random"] = 0.0,
) -> Tensor:
    """Overwrite one rectangle in each image with the given probability.

    Area and position are uniform, the aspect ratio log-uniform. Nothing waits for the device. Erase after
    normalization, so that 0 is the data's mean.

    Args:
        x_NCHW: (N, C, H, W), any dtype.
        seeds: (N,) int64 on the images' device; a sample's rectangle depends only on its seed.
        generator: instead of seeds, on the CPU or the images' device; its state advances.
        probability: that an image is erased, in [0, 1].
        scale: range of the area as a fraction of the image's, in (0, 1].
        ratio: range of height over width, above 0.
        value: a number, a 0-d or (C,) tensor on the device (the mean), or 'random': standard normal noise,
            for floating-point images only.

    Returns:
        New images, same dtype, device and memory format.

    Raises:
        TypeError: seeds are not int64; 'random' for integers.
        ValueError: not exactly one of seeds and generator, a setting out of range, shapes that do not fit.

    Example:
        >>> x = torch.ones(8, 3, 32, 32)
        >>> erased = random_erasing(x, generator=torch.Generator().manual_seed(0), probability=1.0)
        >>> share = 1 - erased.mean((1, 2, 3))  # of each image
        >>> bool(((0.015 < share) & (share < 0.34)).all())
        True
    """
    _check(x_NCHW, probability, scale, ratio, value)
    if (seeds is None) == (generator is None):
        raise ValueError("give seeds or generator, one of the two")
    if generator is not None:
        drawn = torch.randint(
            2**63 - 1, x_NCHW.shape[:1], generator=generator, device=generator.device
        )
        seeds = _moved(drawn, x_NCHW.device)
    assert seeds is not None
    if seeds.dtype != torch.int64:
        raise TypeError(f"seeds must be int64, got {seeds.dtype}")
    if seeds.shape != x_NCHW.shape[:1] or seeds.device != x_NCHW.device:
        raise ValueError(
            f"seeds must be ({len(x_NCHW)},) on {x_NCHW.device}, got {tuple(seeds.shape)} on {seeds.device}"
        )
    in_rows, in_columns = _box(seeds, x_NCHW.shape[2], x_NCHW.shape[3], scale, ratio)
    in_rows &= (_uniform(_bits(seeds, 1)) < probability)[:, None]
    box = in_rows[:, None, :, None] & in_columns[:, None, None, :]
    if isinstance(value, str):
        return _with_noise(x_NCHW, box, _bits(seeds, 6))
    if not isinstance(value, Tensor):  # torch.tensor would wait for the device
        value = torch.full((1,), value, dtype=x_NCHW.dtype, device=x_NCHW.device)
    return torch.where(box, value.to(x_NCHW.dtype).view(-1, 1, 1), x_NCHW)


def _box(
    seeds: Tensor, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Tensor, Tensor]:
    """(N, H) and (N, W) bool: the rows and columns of the first rectangle that fits."""
    tries = torch.arange(_TRIES, device=seeds.device)
    share = _uniform(_numbered(_bits(seeds, 2)[:, None], tries))
    area = height * width * (scale[0] + (scale[1] - scale[0]) * share)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    shape = torch.exp(low + (high - low) * _uniform(_numbered(_bits(seeds, 3)[:, None], tries)))
    rows = torch.sqrt(area * shape).round().long()
    columns = torch.sqrt(area / shape).round().long()
    fits = (rows < height) & (columns < width)
    first = fits.to(torch.uint8).argmax(1, keepdim=True)
    rows = (rows * fits).gather(1, first)  # 0 if none fits
    columns = columns.gather(1, first)
    top = _below(_bits(seeds, 4)[:, None], height - rows + 1)
    left = _below(_bits(seeds, 5)[:, None], (width - columns).clamp(min=0) + 1)
    at_row = torch.arange(height, device=seeds.device)
    at_column = torch.arange(width, device=seeds.device)
    return (
        (at_row >= top) & (at_row < top + rows),
        (at_column >= left) & (at_column < left + columns),
    )


def _with_noise(x_NCHW: Tensor, box: Tensor, bits: Tensor) -> Tensor:
    if x_NCHW.device.type != "cpu":
        indices = torch.arange(x_NCHW[0].numel(), device=x_NCHW.device)
        noise = _normal(_numbered(bits[:, None], indices)).view_as(x_NCHW)
        # The images come first, because the result gets the memory format of the first full operand.
        return torch.where(~box, x_NCHW, noise.to(x_NCHW.dtype))
    # On a CPU the same numbers are made only for erased pixels; nonzero would wait for another device.
    result = x_NCHW.clone()
    box = box.expand_as(x_NCHW)
    images, indices = box.flatten(1).nonzero().unbind(1)
    result[box] = _normal(_numbered(bits[images], indices)).to(x_NCHW.dtype)
    return result


def _bits(seeds: Tensor, stream: int) -> Tensor:
    """64 random bits per seed, different for each stream."""
    return _mix(_mix(seeds + _GAMMA) + stream)


def _numbered(bits: Tensor, numbers: Tensor) -> Tensor:
    """64 random bits per number, derived from `bits`."""
    return _mix(bits + numbers * _GAMMA)


def _mix(bits: Tensor) -> Tensor:
    # int64 wraps modulo 2**64; the masks turn torch's arithmetic shifts into logical ones.
    bits = (bits ^ bits >> 30 & (1 << 34) - 1) * _MIX_1
    bits = (bits ^ bits >> 27 & (1 << 37) - 1) * _MIX_2
    return bits ^ bits >> 31 & (1 << 33) - 1


def _uniform(bits: Tensor) -> Tensor:
    """float32 in [0, 1) from the highest 24 bits, which it represents exactly."""
    return (bits >> 40 & (1 << 24) - 1).float() * 2.0**-24


def _normal(bits: Tensor) -> Tensor:
    """Box and Muller, 1958; 1 - u is never 0."""
    size = torch.sqrt(-2 * torch.log1p(-_uniform(bits)))
    return size * torch.cos(2 * math.pi * _uniform(bits << 24))


def _below(bits: Tensor, limit: Tensor) -> Tensor:
    return (bits >> 11 & (1 << 53) - 1) % limit


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()  # only copies from pinned memory never wait
    return tensor.to(device, non_blocking=True)


def _check(
    x_NCHW: Tensor,
    probability: float,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    value: float | Tensor | str,
) -> None:
    if x_NCHW.dim() != 4:
        raise ValueError(f"images must be (N, C, H, W), got {tuple(x_NCHW.shape)}")
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be in [0, 1], got {probability}")
    if not 0 < scale[0] <= scale[1] <= 1:
        raise ValueError(f"scale must be (low, high) with 0 < low <= high <= 1, got {scale}")
    if not 0 < ratio[0] <= ratio[1] < math.inf:
        raise ValueError(f"ratio must be (low, high) with 0 < low <= high, finite, got {ratio}")
    if isinstance(value, str):
        if value != "random":
            raise ValueError(f"value must be a number, a tensor or 'random', got {value!r}")
        if not x_NCHW.is_floating_point():
            raise TypeError(f"'random' needs floating images, got {x_NCHW.dtype}")
    elif not isinstance(value, Tensor) and value not in _as_stored(value, x_NCHW.dtype):
        raise ValueError(f"value must be one of {x_NCHW.dtype}, as the images, got {value}")
    if isinstance(value, Tensor) and value.shape not in ((), x_NCHW.shape[1:2]):
        raise ValueError(
            f"value must have shape () or ({x_NCHW.shape[1]},), got {tuple(value.shape)}"
        )


def _as_stored(value: float, dtype: torch.dtype) -> list[float]:
    """What images of this type hold after the value is written into them."""
    if dtype.is_floating_point:
        return [value]
    stored: list[float] = torch.full((1,), value, device="cpu").to(dtype).tolist()
    return stored
