"""Transforms of torchvision (v1, v2) and timm as steps of our own, drawn from a seed.

Only the classes themselves are known, not those derived from them, and only with arguments that our steps
have: for everything else these functions give None, and it is the user's own call.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision.transforms import v2

from flambeau.data.images.decode import Picture
from flambeau.data.images.pixels import Pixels
from flambeau.data.transforms import color
from flambeau.data.transforms.auto_augment import rand_augment, trivial_augment_wide
from flambeau.data.transforms.color import uniform
from flambeau.data.transforms.crops import random_resized_crop_box
from flambeau.data.transforms.resizing import resized_part, resized_window

Source = Callable[[Picture, int, int], Pixels]
"""Pixels (H, W, C) uint8 of a picture, as so many channels, drawn from a seed."""
PixelStep = Callable[[Pixels, int], Pixels]
"""Pixels (H, W, C) uint8 to such ones, drawn from a seed."""

_FILTERS = {"bilinear", "bicubic"}


def whole(picture: Picture, channels: int, seed: int) -> Pixels:
    """All of it."""
    return picture.pixels(channels=channels)


def is_pointwise(transform: Any) -> bool:
    """Whether it makes other numbers of levels, each alone."""
    return _is(
        transform, v1.ToTensor, v1.PILToTensor, v1.ConvertImageDtype, v1.Normalize, v2.ToImage,
        v2.PILToTensor, v2.ToDtype, v2.ConvertImageDtype, v2.Normalize, v2.ToPureTensor,
    ) or _timm(transform, "MaybeToTensor", "MaybePILToTensor")  # fmt: skip


def keeps_levels(transform: Any) -> bool:
    """Whether a pointwise transform leaves 8 bits."""
    if _is(transform, v1.ConvertImageDtype, v2.ConvertImageDtype, v2.ToDtype):
        return bool(transform.dtype == torch.uint8)
    return _is(transform, v1.PILToTensor, v2.PILToTensor, v2.ToImage, v2.ToPureTensor) or _timm(
        transform, "MaybePILToTensor"
    )


def takes_pictures(transform: Any) -> bool:
    """Whether a transform that we have not is known to make PIL images of PIL images."""
    return type(transform).__module__.startswith(("torchvision.transforms.", "timm.data."))


def as_it_is(transform: Any) -> PixelStep:
    """The user's own call, on a PIL image."""

    def step(pixels: Pixels, seed: int) -> Pixels:
        image = Image.fromarray(
            np.ascontiguousarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        )
        changed = np.asarray(transform(image))
        return changed if changed.ndim == 3 else changed[:, :, None]

    return step


def source_of(transforms: Sequence[Any]) -> tuple[Source, int] | None:
    """How the first transforms make pixels of a file, if they are a crop or a resizing.

    Returns:
        The function, and how many transforms it stands for.
    """
    skipped = 0
    while skipped < len(transforms) and is_pointwise(transforms[skipped]):
        if not keeps_levels(transforms[skipped]):
            return None
        skipped += 1
    rest = transforms[skipped:]
    if not rest:
        return None
    crop = _random_resized_crop(rest[0])
    if crop is not None:
        size, draw = crop
        mirror = _mirror_probability(rest[1]) if len(rest) > 1 else None

        def cropped(picture: Picture, channels: int, seed: int) -> Pixels:
            box, filter_ = draw(picture.height, picture.width, seed)
            turned = mirror is not None and uniform(seed, 1) < mirror
            return resized_part(
                picture, box, size, channels=channels, interpolation=filter_, mirror=turned
            )

        return cropped, skipped + 1 + (mirror is not None)
    resized = _resized(rest)
    return None if resized is None else (resized[0], skipped + resized[1])


def pixel_step(transform: Any) -> PixelStep | None:
    """The step of a transform of pixels."""
    if (p := _mirror_probability(transform)) is not None:
        return lambda pixels, seed: pixels[:, ::-1] if uniform(seed, 1) < p else pixels
    if _is(transform, v1.RandomVerticalFlip, v2.RandomVerticalFlip):
        return lambda pixels, seed: pixels[::-1] if uniform(seed, 1) < transform.p else pixels
    if (window := _center_crop(transform)) is not None:
        return lambda pixels, seed: _center_cropped(pixels, window)
    if _is(transform, v1.RandomCrop, v2.RandomCrop):
        return _random_crop(transform)
    if _is(transform, v1.ColorJitter, v2.ColorJitter):
        return lambda pixels, seed: _jittered(pixels, seed, transform)
    if _is(transform, v1.RandAugment, v2.RandAugment) and _plain(transform):
        return lambda pixels, seed: rand_augment(
            pixels, seed, num_ops=transform.num_ops, magnitude=transform.magnitude,
            num_magnitude_bins=transform.num_magnitude_bins,
        )  # fmt: skip
    if _is(transform, v1.TrivialAugmentWide, v2.TrivialAugmentWide):
        usual = _plain(transform) and transform.num_magnitude_bins == 31
        return trivial_augment_wide if usual else None
    if (source := source_of([transform])) is not None:
        return lambda pixels, seed: source[0](Picture(pixels), pixels.shape[2], seed)
    if _is(transform, v1.RandomApply, v2.RandomApply):
        return _random_apply(transform)
    if _is(transform, v1.RandomChoice, v2.RandomChoice):
        return _random_choice(transform)
    return None


def erasing(transform: Any) -> Callable[[Tensor, int], Tensor] | None:
    """The step of a RandomErasing of torchvision's or timm's, on (C, H, W) floating-point numbers."""
    if _is(transform, v1.RandomErasing, v2.RandomErasing):
        value = transform.value
        numbers = None if value is None or isinstance(value, str) else value
        return lambda x, seed: _erased(
            x, seed, p=transform.p, counts=(1, 1), scale=transform.scale,
            log_ratio=(math.log(transform.ratio[0]), math.log(transform.ratio[1])),
            fill=_noise if numbers is None else lambda shape, _: _constant(numbers),
        )  # fmt: skip
    if _timm(transform, "RandomErasing") and transform.num_splits <= 1:
        fill = _noise if transform.per_pixel else _one_color if transform.rand_color else None
        return lambda x, seed: _erased(
            x, seed, p=transform.probability, counts=(transform.min_count, transform.max_count),
            scale=(transform.min_area, transform.max_area), log_ratio=transform.log_aspect_ratio,
            fill=fill or (lambda shape, _: _constant(0.0)),
        )  # fmt: skip
    return None


# ---------------------------------------------------------------- crops


def _resized(transforms: Sequence[Any]) -> tuple[Source, int] | None:
    """A resizing of the whole, and the crop behind it."""
    sides = _resize(transforms[0])
    if sides is None:
        return None
    window = _center_crop(transforms[1]) if len(transforms) > 1 else None

    def resized(picture: Picture, channels: int, seed: int) -> Pixels:
        height, width, filter_ = sides(picture.height, picture.width)
        part = (0, 0, height, width)
        if window is not None and window[0] <= height and window[1] <= width:
            part = (round((height - window[0]) / 2), round((width - window[1]) / 2), *window)
        pixels = resized_window(
            picture, (height, width), part, channels=channels, interpolation=filter_
        )
        return pixels if window is None else _center_cropped(pixels, window)

    return resized, 1 + (window is not None)


_Draw = Callable[[int, int, int], tuple[tuple[int, int, int, int], str]]


def _random_resized_crop(transform: Any) -> tuple[tuple[int, int], _Draw] | None:
    """Height and width of the result, and how box and filter are drawn."""
    if not _is(transform, v1.RandomResizedCrop, v2.RandomResizedCrop) and not _timm(
        transform, "RandomResizedCropAndInterpolation"
    ):
        return None
    modes = transform.interpolation
    modes = modes if isinstance(modes, tuple | list) else [modes]
    filters, scale, ratio = [_filter(mode) for mode in modes], transform.scale, transform.ratio
    if not {*filters} <= _FILTERS or getattr(transform, "antialias", True) is False:
        return None
    if not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        return None

    def draw(height: int, width: int, seed: int) -> tuple[tuple[int, int, int, int], str]:
        box = random_resized_crop_box(height, width, seed, scale=tuple(scale), ratio=tuple(ratio))
        return box, filters[int(uniform(seed, 2) * len(filters))]

    return _two(transform.size), draw


def _resize(transform: Any) -> Callable[[int, int], tuple[int, int, str]] | None:
    """Of height and width of a picture the ones it is resized to, and the filter."""
    if not _is(transform, v1.Resize, v2.Resize) or transform.antialias is False:
        return None
    size, filter_ = transform.size, _filter(transform.interpolation)
    if filter_ not in _FILTERS or transform.max_size is not None or size is None:
        return None
    sides = [size] if isinstance(size, int) else list(size)
    if len(sides) == 2:
        return lambda height, width: (sides[0], sides[1], filter_)
    [shorter] = sides

    def keeping_ratio(height: int, width: int) -> tuple[int, int, str]:
        if height <= width:
            return shorter, int(shorter * width / height), filter_
        return int(shorter * height / width), shorter, filter_

    return keeping_ratio


def _filter(interpolation: Any) -> str:
    """The name of what v1 has as InterpolationMode, and v2 as its value."""
    value = getattr(interpolation, "value", interpolation)
    return value if isinstance(value, str) else "another"


def _center_crop(transform: Any) -> tuple[int, int] | None:
    return _two(transform.size) if _is(transform, v1.CenterCrop, v2.CenterCrop) else None


def _center_cropped(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """As torchvision's: where a side is too short, black comes on both sides of it."""
    missing = [max(0, n - side) for n, side in zip(size, pixels.shape, strict=False)]
    if any(missing):
        room = [(n // 2, (n + 1) // 2) for n in missing]
        pixels = np.pad(pixels, [*room, (0, 0)])
    top, left = (round((side - n) / 2) for side, n in zip(pixels.shape, size, strict=False))
    return pixels[top : top + size[0], left : left + size[1]]


def _random_crop(transform: Any) -> PixelStep | None:
    padding = transform.padding
    plain = transform.padding_mode == "constant" and not transform.pad_if_needed
    fill = (
        transform.fill.get(Image.Image, 0) if isinstance(transform.fill, dict) else transform.fill
    )
    if not plain or fill not in (0, None, (0,), [0]):
        return None
    edges = [padding or 0] if not isinstance(padding, tuple | list) else list(padding)
    left, top, right, bottom = (edges * 4 if len(edges) == 1 else edges * 2)[:4]
    height, width = _two(transform.size)

    def step(pixels: Pixels, seed: int) -> Pixels:
        padded = np.pad(pixels, [(top, bottom), (left, right), (0, 0)])
        if padded.shape[0] < height or padded.shape[1] < width:
            raise ValueError(
                f"required crop size {(height, width)} is larger than input image size {padded.shape[:2]}"
            )
        row = int(uniform(seed, 1) * (padded.shape[0] - height + 1))
        column = int(uniform(seed, 2) * (padded.shape[1] - width + 1))
        return padded[row : row + height, column : column + width]

    return step


def _mirror_probability(transform: Any) -> float | None:
    flips = _is(transform, v1.RandomHorizontalFlip, v2.RandomHorizontalFlip)
    return float(transform.p) if flips else None


# ---------------------------------------------------------------- color, and choices

_ADJUST = (
    ("brightness", color.adjust_brightness), ("contrast", color.adjust_contrast),
    ("saturation", color.adjust_saturation), ("hue", color.adjust_hue),
)  # fmt: skip


def _jittered(pixels: Pixels, seed: int, transform: Any) -> Pixels:
    """The four changes in random order, each by a factor drawn evenly from its range."""
    order = sorted(range(4), key=lambda number: uniform(seed, number))
    for number in order:
        name, adjust = _ADJUST[number]
        limits = getattr(transform, name)
        if limits is not None:
            low, high = map(float, limits)
            pixels = adjust(pixels, low + (high - low) * uniform(seed, 4 + number))
    return pixels


def _plain(transform: Any) -> bool:
    """With nearest neighbours and black where nothing is, as our operations have it."""
    fill = getattr(transform, "fill", None)
    fill = fill.get(Image.Image) if isinstance(fill, dict) else fill
    return _filter(transform.interpolation) == "nearest" and fill in (None, 0, [0.0], (0,))


def _random_apply(transform: Any) -> PixelStep | None:
    steps = [pixel_step(one) for one in transform.transforms]
    if any(step is None for step in steps):
        return None

    def step(pixels: Pixels, seed: int) -> Pixels:
        if uniform(seed, 1) >= transform.p:
            return pixels
        for number, one in enumerate(steps, start=2):
            assert one is not None
            pixels = one(pixels, seed + number)
        return pixels

    return step


def _random_choice(transform: Any) -> PixelStep | None:
    steps = [pixel_step(one) for one in transform.transforms]
    weights = getattr(transform, "p", None) or [1.0] * len(steps)
    if any(step is None for step in steps):
        return None
    ends = np.cumsum(weights) / np.sum(weights)

    def step(pixels: Pixels, seed: int) -> Pixels:
        chosen = steps[int(np.searchsorted(ends, uniform(seed, 1), side="right"))]
        assert chosen is not None
        return chosen(pixels, seed + 2)

    return step


# ---------------------------------------------------------------- erasing

_Fill = Callable[[tuple[int, int, int], torch.Generator], Tensor]


def _erased(
    x: Tensor,
    seed: int,
    *,
    p: float,
    counts: tuple[int, int],
    scale: Sequence[float],
    log_ratio: tuple[float, float],
    fill: _Fill,
) -> Tensor:
    """(C, H, W) with rectangles filled: as often, as large and as long as the two libraries draw them."""
    if uniform(seed, 0) >= p:
        return x
    channels, height, width = x.shape
    count = counts[0] + int(uniform(seed, 1) * (counts[1] - counts[0] + 1))
    generator = torch.Generator().manual_seed(seed % 2**63)
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
    return torch.empty(shape).normal_(generator=generator)


def _one_color(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    return torch.empty(shape[0], 1, 1).normal_(generator=generator)


def _constant(value: Any) -> Tensor:
    return torch.tensor(value if isinstance(value, tuple | list) else [value]).float()[
        :, None, None
    ]


# ---------------------------------------------------------------- classes


def _is(transform: Any, *kinds: type) -> bool:
    return type(transform) in kinds


def _timm(transform: Any, *names: str) -> bool:
    """Known by name: timm is imported by those who use it."""
    kind = type(transform)
    return kind.__module__.startswith("timm.data.") and kind.__name__ in names


def _two(size: Any) -> tuple[int, int]:
    sides = [size] if isinstance(size, int) else list(size)
    return (sides[0], sides[0]) if len(sides) == 1 else (sides[0], sides[1])
