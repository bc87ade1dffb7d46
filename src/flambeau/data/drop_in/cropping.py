"""Crops, resizings and flips of torchvision (v1, v2) and timm in flambeau's code, drawn from a seed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from flambeau.data.drop_in.sample_context import Seeds
from flambeau.data.drop_in.transform_kinds import filter_name, is_from_timm, is_one_of
from flambeau.data.transforms.color import uniform
from flambeau.data.transforms.crops import random_resized_crop_box
from flambeau.data.transforms.mask_crops import nearest
from flambeau.data.transforms.resizing import resized_part, resized_window
from flambeau.images.decode import Picture
from flambeau.images.pixels import Pixels

Source = Callable[[Picture, int, Seeds], Pixels]
"""(picture, channels, seeds) -> pixels (H, W, C) uint8."""
PixelStep = Callable[[Pixels, Seeds], Pixels]
"""(pixels (H, W, C) uint8, seeds) -> pixels (H, W, C) uint8; of masks (H, W, N) of any dtype."""

_Draw = Callable[[int, int, Seeds], tuple[tuple[int, int, int, int], str]]
_FILTERS = {"bilinear", "bicubic"}


def whole(picture: Picture, channels: int, seeds: Seeds) -> Pixels:
    return picture.pixels(channels=channels)


def source_of(transforms: Sequence[Any], *, of_tensor: bool) -> tuple[Source, int] | None:
    """A function for the first transforms if they are a crop or a resizing, and how many it replaces.

    `of_tensor`: they get a tensor, which torch resizes, and not a PIL image.
    """
    if not transforms:
        return None
    crop = _random_resized_crop(transforms[0])
    if crop is not None:
        size, draw = crop
        mirror = _mirror_probability(transforms[1]) if len(transforms) > 1 else None

        def cropped(picture: Picture, channels: int, seeds: Seeds) -> Pixels:
            box, filter_ = draw(picture.height, picture.width, seeds)
            turned = mirror is not None and uniform(seeds.torch, 1) < mirror
            return resized_part(
                picture, box, size, channels=channels, interpolation=filter_, mirror=turned
            )

        return cropped, 1 + (mirror is not None)
    return _resized(transforms, like_pillow=not of_tensor)


def crop_step(transform: Any, *, of_tensor: bool) -> PixelStep | None:
    """The step of a crop, a resizing or a flip; `of_tensor` as in `source_of`."""
    if (p := _mirror_probability(transform)) is not None:
        return lambda pixels, seeds: pixels[:, ::-1] if uniform(seeds.torch, 1) < p else pixels
    if is_one_of(transform, v1.RandomVerticalFlip, v2.RandomVerticalFlip):
        return lambda pixels, seeds: (
            pixels[::-1] if uniform(seeds.torch, 1) < transform.p else pixels
        )
    if (window := _center_crop(transform)) is not None:
        return lambda pixels, seeds: _center_cropped(pixels, window)
    if is_one_of(transform, v1.RandomCrop, v2.RandomCrop):
        return _random_crop(transform)
    if (source := source_of([transform], of_tensor=of_tensor)) is not None:
        return lambda pixels, seeds: source[0](Picture(pixels), pixels.shape[2], seeds)
    return None


def mask_source(transforms: Sequence[Any]) -> PixelStep | None:
    """What the transforms that `source_of` replaces do to a mask, if known."""
    if not all(map(_is_v2, transforms)):
        return None
    crop = _random_resized_crop(transforms[0])
    if crop is not None:
        size, draw = crop
        mirror = _mirror_probability(transforms[1]) if len(transforms) > 1 else None

        def cropped(pixels: Pixels, seeds: Seeds) -> Pixels:
            box, _ = draw(pixels.shape[0], pixels.shape[1], seeds)
            turned = mirror is not None and uniform(seeds.torch, 1) < mirror
            result = _nearest_part(pixels, box, size)
            return result[:, ::-1] if turned else result

        return cropped
    sides = _resize(transforms[0])
    if sides is None:
        return None
    window = _center_crop(transforms[1]) if len(transforms) > 1 else None

    def resized(pixels: Pixels, seeds: Seeds) -> Pixels:
        height, width, _ = sides(*pixels.shape[:2])
        result = _nearest_part(pixels, (0, 0, *pixels.shape[:2]), (height, width))
        return result if window is None else _center_cropped(result, window)

    return resized


def mask_step(transform: Any) -> PixelStep | None:
    """What a transform does to a mask while `pixel_step` changes its image, if known."""
    if not _is_v2(transform) or isinstance(getattr(transform, "fill", None), dict):
        return None
    if is_one_of(transform, v2.ColorJitter):
        return lambda pixels, seeds: pixels
    return mask_source([transform]) or crop_step(transform, of_tensor=True)


def _is_v2(transform: Any) -> bool:
    """Whether it knows of masks."""
    return type(transform).__module__.startswith("torchvision.transforms.v2.")


def _nearest_part(pixels: Pixels, box: tuple[int, int, int, int], size: tuple[int, int]) -> Pixels:
    """A part (top, left, height, width) in another size (height, width), by nearest neighbour."""
    top, left, height, width = box
    rows = top + nearest(height, size[0])
    return np.take(pixels[rows], left + nearest(width, size[1]), axis=1)


def _resized(transforms: Sequence[Any], *, like_pillow: bool) -> tuple[Source, int] | None:
    """A resizing of the whole picture, and the center crop after it."""
    sides = _resize(transforms[0])
    if sides is None:
        return None
    window = _center_crop(transforms[1]) if len(transforms) > 1 else None

    def resized(picture: Picture, channels: int, seeds: Seeds) -> Pixels:
        height, width, filter_ = sides(picture.height, picture.width)
        part = (0, 0, height, width)
        if window is not None and window[0] <= height and window[1] <= width:
            part = (round((height - window[0]) / 2), round((width - window[1]) / 2), *window)
        pixels = resized_window(
            picture,
            (height, width),
            part,
            channels=channels,
            interpolation=filter_,
            like_pillow=like_pillow,
        )
        return pixels if window is None else _center_cropped(pixels, window)

    return resized, 1 + (window is not None)


def _random_resized_crop(transform: Any) -> tuple[tuple[int, int], _Draw] | None:
    """Height and width of the result, and a function that draws box and filter."""
    of_timm = is_from_timm(transform, "RandomResizedCropAndInterpolation")
    if not of_timm and not is_one_of(transform, v1.RandomResizedCrop, v2.RandomResizedCrop):
        return None
    modes = transform.interpolation
    modes = modes if isinstance(modes, tuple | list) else [modes]
    filters = [filter_name(mode) for mode in modes]
    scale = transform.scale
    ratio = transform.ratio
    if not {*filters} <= _FILTERS or getattr(transform, "antialias", True) is False:
        return None
    if not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        return None

    def draw(height: int, width: int, seeds: Seeds) -> tuple[tuple[int, int, int, int], str]:
        seed = seeds.python if of_timm else seeds.torch
        box = random_resized_crop_box(height, width, seed, scale=tuple(scale), ratio=tuple(ratio))
        return box, filters[int(uniform(seed, 2) * len(filters))]

    return _two(transform.size), draw


def _resize(transform: Any) -> Callable[[int, int], tuple[int, int, str]] | None:
    """A function from the picture's height and width to those of the result, and the filter."""
    if not is_one_of(transform, v1.Resize, v2.Resize) or transform.antialias is False:
        return None
    size = transform.size
    filter_ = filter_name(transform.interpolation)
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


def _center_crop(transform: Any) -> tuple[int, int] | None:
    return _two(transform.size) if is_one_of(transform, v1.CenterCrop, v2.CenterCrop) else None


def _center_cropped(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """As torchvision's: a side that is too short is padded with black at both ends."""
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
    if is_one_of(transform, v2.RandomCrop) and len(edges) == 4:  # v2 stores another order
        left, right, top, bottom = edges
    height, width = _two(transform.size)

    def step(pixels: Pixels, seeds: Seeds) -> Pixels:
        padded = np.pad(pixels, [(top, bottom), (left, right), (0, 0)])
        if padded.shape[0] < height or padded.shape[1] < width:
            raise ValueError(
                f"required crop size {(height, width)} is larger than input image size {padded.shape[:2]}"
            )
        row = int(uniform(seeds.torch, 1) * (padded.shape[0] - height + 1))
        column = int(uniform(seeds.torch, 2) * (padded.shape[1] - width + 1))
        return padded[row : row + height, column : column + width]

    return step


def _mirror_probability(transform: Any) -> float | None:
    flips = is_one_of(transform, v1.RandomHorizontalFlip, v2.RandomHorizontalFlip)
    return float(transform.p) if flips else None


def _two(size: Any) -> tuple[int, int]:
    sides = [size] if isinstance(size, int) else list(size)
    return (sides[0], sides[0]) if len(sides) == 1 else (sides[0], sides[1])
