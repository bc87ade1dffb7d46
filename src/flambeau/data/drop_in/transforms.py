"""Transforms of torchvision (v1, v2) and timm in flambeau's code, drawn from a seed.

Only the classes themselves are known, not those derived from them, and only with arguments that flambeau
supports. For everything else these functions return None, and the user's transform is called.
"""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.transforms import v2

from flambeau.data.drop_in.cropping import PixelStep, crop_step
from flambeau.data.drop_in.sample_context import Seeds
from flambeau.data.drop_in.transform_kinds import filter_name, is_from_timm, is_one_of
from flambeau.data.transforms import color
from flambeau.data.transforms.auto_augment import (
    Operation,
    apply_operations,
    rand_augment,
    trivial_augment_wide,
)
from flambeau.data.transforms.color import uniform
from flambeau.images.channels import to_image
from flambeau.images.pixels import Pixels


def is_pointwise(transform: Any) -> bool:
    """Whether it maps each level to a number, independently of the others."""
    return is_one_of(
        transform,
        v1.ToTensor,
        v1.PILToTensor,
        v1.ConvertImageDtype,
        v1.Normalize,
        v2.ToImage,
        v2.PILToTensor,
        v2.ToDtype,
        v2.ConvertImageDtype,
        v2.Normalize,
        v2.ToPureTensor,
    ) or is_from_timm(transform, "MaybeToTensor", "MaybePILToTensor")


def keeps_levels(transform: Any) -> bool:
    """Whether the result of a pointwise transform has 8 bits."""
    if is_one_of(transform, v1.ConvertImageDtype, v2.ConvertImageDtype, v2.ToDtype):
        return bool(transform.dtype == torch.uint8)
    return is_one_of(
        transform, v1.PILToTensor, v2.PILToTensor, v2.ToImage, v2.ToPureTensor
    ) or is_from_timm(transform, "MaybePILToTensor")


_PIL_TO_PIL = frozenset(
    {
        "AugMix",
        "AutoAugment",
        "CenterCrop",
        "ColorJitter",
        "ElasticTransform",
        "GaussianBlur",
        "Grayscale",
        "Pad",
        "RandAugment",
        "RandomAdjustSharpness",
        "RandomAffine",
        "RandomAutocontrast",
        "RandomCrop",
        "RandomEqualize",
        "RandomGrayscale",
        "RandomInvert",
        "RandomPerspective",
        "RandomPosterize",
        "RandomResizedCrop",
        "RandomRotation",
        "RandomSolarize",
        "Resize",
        "TrivialAugmentWide",
        "AugMixAugment",
        "CenterCropOrPad",
        "RandomCropOrPad",
        "RandomResizedCropAndInterpolation",
        "ResizeKeepRatio",
    }
)
"""Classes of torchvision and timm that map one PIL image to one, unlike FiveCrop or Lambda."""


_CONTAINERS = (v1.RandomApply, v2.RandomApply, v1.RandomChoice, v2.RandomChoice)


def draws_from_python(transform: Any) -> bool:
    """Whether the original of a known transform draws from Python's `random`."""
    if is_one_of(transform, v1.RandomChoice):
        return True
    if is_one_of(transform, *_CONTAINERS):
        return any(draws_from_python(one) for one in transform.transforms)
    return is_from_timm(transform, "RandomResizedCropAndInterpolation", "RandomErasing")


def takes_pil_image(transform: Any) -> bool:
    """Whether a transform is known to map a PIL image to a PIL image."""
    if is_one_of(transform, *_CONTAINERS):
        return all(
            takes_pil_image(one) or pixel_step(one) is not None for one in transform.transforms
        )
    kind = type(transform)
    known = kind.__module__.startswith(("torchvision.transforms.", "timm.data."))
    return known and kind.__name__ in _PIL_TO_PIL


def call_on_image(transform: Any) -> PixelStep:

    def step(pixels: Pixels, seeds: Seeds) -> Pixels:
        changed = np.asarray(transform(to_image(pixels)))
        return changed if changed.ndim == 3 else changed[:, :, None]

    return step


def pixel_step(transform: Any, *, of_tensor: bool = False) -> PixelStep | None:
    """The step of a transform of pixels, from a tensor or a PIL image."""
    if (step := crop_step(transform, of_tensor=of_tensor)) is not None:
        return step
    if is_one_of(transform, v1.ColorJitter, v2.ColorJitter):
        return lambda pixels, seeds: _jittered(pixels, seeds.torch, transform)
    if is_one_of(transform, v1.RandAugment, v2.RandAugment) and _plain(transform):
        return lambda pixels, seeds: rand_augment(
            pixels,
            seeds.torch,
            num_ops=transform.num_ops,
            magnitude=transform.magnitude,
            num_magnitude_bins=transform.num_magnitude_bins,
        )
    if is_one_of(transform, v1.TrivialAugmentWide, v2.TrivialAugmentWide):
        is_default = _plain(transform) and transform.num_magnitude_bins == 31
        if not is_default:
            return None
        return lambda pixels, seeds: trivial_augment_wide(pixels, seeds.torch)
    if is_one_of(transform, v1.AutoAugment, v2.AutoAugment) and _plain(transform):
        return lambda pixels, seeds: _auto_augmented(pixels, seeds.torch, transform)
    if is_one_of(transform, v1.RandomApply, v2.RandomApply):
        return _random_apply(transform, of_tensor)
    if is_one_of(transform, v1.RandomChoice, v2.RandomChoice):
        return _random_choice(transform, of_tensor)
    return None


# ---------------------------------------------------------------- color, and choices

_ADJUST = (
    ("brightness", color.adjust_brightness),
    ("contrast", color.adjust_contrast),
    ("saturation", color.adjust_saturation),
    ("hue", color.adjust_hue),
)


def _jittered(pixels: Pixels, seed: int, transform: Any) -> Pixels:
    """The four changes in random order, each by a factor drawn uniformly from its range."""
    order = sorted(range(4), key=lambda number: uniform(seed, number))
    for number in order:
        name, adjust = _ADJUST[number]
        limits = getattr(transform, name)
        if limits is not None:
            low, high = map(float, limits)
            pixels = adjust(pixels, low + (high - low) * uniform(seed, 4 + number))
    return pixels


def _plain(transform: Any) -> bool:
    """Whether it uses nearest neighbours and fills with black, as our operations do."""
    fill = getattr(transform, "fill", None)
    fill = fill.get(Image.Image) if isinstance(fill, dict) else fill
    return filter_name(transform.interpolation) == "nearest" and fill in (None, 0, [0.0], (0,))


def _random_apply(transform: Any, of_tensor: bool) -> PixelStep | None:
    steps = [pixel_step(one, of_tensor=of_tensor) for one in transform.transforms]
    if any(step is None for step in steps):
        return None

    def step(pixels: Pixels, seeds: Seeds) -> Pixels:
        if uniform(seeds.torch, 1) >= transform.p:
            return pixels
        for number, (one, inner) in enumerate(
            zip(steps, transform.transforms, strict=True), start=2
        ):
            assert one is not None
            # Transforms inside of `inner` count on from its seeds, and would meet those of its neighbors.
            has_inner = is_one_of(inner, *_CONTAINERS)
            pixels = one(pixels, seeds.of_step(number) if has_inner else seeds + number)
        return pixels

    return step


def _random_choice(transform: Any, of_tensor: bool) -> PixelStep | None:
    steps = [pixel_step(one, of_tensor=of_tensor) for one in transform.transforms]
    weights = getattr(transform, "p", None) or [1.0] * len(steps)
    if any(step is None for step in steps):
        return None
    ends = np.cumsum(weights) / np.sum(weights)

    of_python = is_one_of(transform, v1.RandomChoice)

    def step(pixels: Pixels, seeds: Seeds) -> Pixels:
        drawn = uniform(seeds.python if of_python else seeds.torch, 1)
        chosen = steps[int(np.searchsorted(ends, drawn, side="right"))]
        assert chosen is not None
        return chosen(pixels, seeds + 2)

    return step


def _auto_augmented(pixels: Pixels, seed: int, transform: Any) -> Pixels:
    """One policy at random, and each of its two operations with its probability."""
    policies = transform.policies if is_one_of(transform, v1.AutoAugment) else transform._policies
    policy = policies[int(uniform(seed, 0) * len(policies))]
    drawn = []
    for number, (name, probability, strength) in enumerate(policy):
        magnitudes, has_sign = _magnitudes(transform, name, *pixels.shape[:2])
        if uniform(seed, 1 + 2 * number) > probability:
            continue
        magnitude = 0.0 if strength is None else float(magnitudes[strength])
        turned = has_sign and uniform(seed, 2 + 2 * number) < 0.5
        drawn.append(Operation(name, -magnitude if turned else magnitude))
    return apply_operations(pixels, drawn)


def _magnitudes(transform: Any, name: str, height: int, width: int) -> tuple[Any, bool]:
    """The ten strengths of an operation on images of this size, and whether its sign is random."""
    if is_one_of(transform, v1.AutoAugment):
        values, has_sign = transform._augmentation_space(10, (height, width))[name]
        return (values / 255 if name == "Solarize" else values), has_sign  # a fraction, as in v2
    of_size, has_sign = transform._AUGMENTATION_SPACE[name]
    return of_size(10, height, width), has_sign
