"""Sample order and per-sample seeds as pure functions of (seed, epoch, index).

样本顺序与逐样本种子：只由 (seed, epoch, index) 决定的纯函数。

Source: SplitMix64, Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014,
the finalizer of section 5 with the constants of `mix64variant13`.
A permutation is the order of 64-bit hashes, so it depends only on integer arithmetic: it is the same for all
versions of torch, devices, numbers of workers and ranks, and resuming needs one integer.

Not for data without a length (streams), and not cryptographic.
"""

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, the increment of SplitMix64
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def sample_order(length: int, *, seed: int, epoch: int) -> Tensor:
    """The order of the samples in an epoch.

    Args:
        length: at least 0.
        seed: any integer; its low 64 bits count.
        epoch: from 0.

    Returns:
        (length,) int64 on the CPU, a permutation of 0 .. length - 1.
        Sorting takes about 0.1 s for a million samples.

    Raises:
        ValueError: a negative length.

    Example:
        >>> sample_order(5, seed=0, epoch=0).tolist() == sample_order(5, seed=0, epoch=0).tolist()
        True
        >>> sorted(sample_order(5, seed=0, epoch=1).tolist())
        [0, 1, 2, 3, 4]
    """
    if length < 0:
        raise ValueError(f"length must be at least 0, got {length}")
    # Two samples with the same hash (probability 2**-64 per pair) keep their order: stable.
    return torch.argsort(sample_seeds(torch.arange(length), seed=seed, epoch=epoch), stable=True)


def sample_seeds(indices: Tensor, *, seed: int, epoch: int) -> Tensor:
    """One seed per sample, for everything random about it in this epoch.

    Args:
        indices: int64 of any shape, positions in the dataset.
        seed, epoch: as for `sample_order`.

    Returns:
        int64, shape and device of `indices`, uniform over all 64-bit integers.

    Raises:
        TypeError: `indices` is not int64.

    Example:
        >>> both = sample_seeds(torch.tensor([3, 8]), seed=1, epoch=2)
        >>> bool(both[1] == sample_seeds(torch.tensor(8), seed=1, epoch=2))
        True
    """
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be int64, got {indices.dtype}")
    stream = mix(mix(seed) ^ (epoch + 1) * _GAMMA)
    # int64 arithmetic wraps modulo 2**64, as the algorithm requires.
    return _mix_tensor((indices + 1) * _signed(_GAMMA) + _signed(stream))


def alternating_seeds(indices: Tensor, *, seed: int, epoch: int) -> Tensor:
    """As `sample_seeds`, but a sample's seed changes its sign in each epoch; random in the first.

    `batch_crop_flip(..., flip="alternate")` mirrors by it: any two successive epochs show both sides of a
    sample; a random flip shows every other sample the same side twice.

    Source: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024 (arXiv:2404.00498), section 3.6.

    Example:
        >>> indices = torch.arange(100)
        >>> signs = [alternating_seeds(indices, seed=1, epoch=epoch) < 0 for epoch in range(3)]
        >>> torch.equal(signs[1], ~signs[0]), torch.equal(signs[2], signs[0])
        (True, True)
    """
    seeds = sample_seeds(indices, seed=seed, epoch=epoch)
    is_negative = (sample_seeds(indices, seed=seed, epoch=0) < 0) ^ bool(epoch % 2)
    rest = seeds & (2**63 - 1)
    return torch.where(is_negative, rest | -(2**63), rest)


def mix(value: int) -> int:
    """SplitMix64's finalizer: a bijection of the 64-bit integers in which every bit affects all bits.

    Args:
        value: any integer; its low 64 bits count.

    Returns:
        An integer in [0, 2**64).

    Example:
        >>> hex(mix(0x9E3779B97F4A7C15))  # the first output of SplitMix64 with seed 0
        '0xe220a8397b1dcdaf'
    """
    value &= 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 30) * _MIX_1 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * _MIX_2 & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def _mix_tensor(value: Tensor) -> Tensor:
    value = (value ^ _shift(value, 30)) * _signed(_MIX_1)
    value = (value ^ _shift(value, 27)) * _signed(_MIX_2)
    return value ^ _shift(value, 31)


def _shift(value: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it a logical shift.
    return value >> bits & (1 << 64 - bits) - 1


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value
