"""Random erasing as in torchvision and timm, drawn from a seed."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

from flambeau.data.drop_in.sample_context import Seeds
from flambeau.data.drop_in.transform_kinds import is_from_timm, is_one_of
from flambeau.data.transforms.color import uniform

_Fill = Callable[[tuple[int, int, int], torch.Generator], Tensor]


FloatStep = Callable[[Tensor, Seeds], Tensor]
"""(floating-point image (C, H, W), seeds) -> the same, often changed in place."""


def erasing(transform: Any) -> FloatStep | None:
    """The step of torchvision's or timm's RandomErasing, on a floating-point image (C, H, W)."""
    if is_one_of(transform, v1.RandomErasing, v2.RandomErasing):
        value = transform.value
        numbers = None if value is None or isinstance(value, str) else value
        return lambda x, seeds: _erased(
            x,
            seeds.torch,
            fill_seed=seeds.torch,
            p=transform.p,
            counts=(1, 1),
            scale=transform.scale,
            log_ratio=(math.log(transform.ratio[0]), math.log(transform.ratio[1])),
            fill=_noise if numbers is None else lambda shape, _: _constant(numbers),
        )
    if is_from_timm(transform, "RandomErasing") and transform.num_splits <= 1:
        fill = _noise if transform.per_pixel else _one_color if transform.rand_color else None
        return lambda x, seeds: _erased(
            x,
            seeds.python,
            fill_seed=seeds.torch,
            p=transform.probability,
            counts=(transform.min_count, transform.max_count),
            scale=(transform.min_area, transform.max_area),
            log_ratio=transform.log_aspect_ratio,
            fill=fill or (lambda shape, _: _constant(0.0)),
        )
    return None


def _erased(
    x: Tensor,
    seed: int,
    *,
    fill_seed: int,
    p: float,
    counts: tuple[int, int],
    scale: Sequence[float],
    log_ratio: tuple[float, float],
    fill: _Fill,
) -> Tensor:
    """(C, H, W) with rectangles filled; number, area and ratio are distributed as in the two libraries."""
    if uniform(seed, 0) >= p:
        return x
    channels, height, width = x.shape
    count = counts[0] + int(uniform(seed, 1) * (counts[1] - counts[0] + 1))
    generator = torch.Generator().manual_seed(fill_seed % 2**63)
    for draw in range(2, 2 + 40 * count, 40):
        for first in range(draw, draw + 40, 4):
            area = scale[0] + (scale[1] - scale[0]) * uniform(seed, first)
            ratio = math.exp(
                log_ratio[0] + (log_ratio[1] - log_ratio[0]) * uniform(seed, first + 1)
            )
            area *= height * width / count
            h, w = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if h < height and w < width:
                top = int(uniform(seed, first + 2) * (height - h + 1))
                left = int(uniform(seed, first + 3) * (width - w + 1))
                x[:, top : top + h, left : left + w] = fill((channels, h, w), generator)
                break
    return x


def _noise(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    return torch.empty(shape, device="cpu").normal_(generator=generator)


def _one_color(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    return torch.empty(shape[0], 1, 1, device="cpu").normal_(generator=generator)


def _constant(value: Any) -> Tensor:
    values = value if isinstance(value, tuple | list) else [value]
    return torch.tensor(values, device="cpu").float()[:, None, None]
