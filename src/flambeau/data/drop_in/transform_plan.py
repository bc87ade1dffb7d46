"""A list of transforms as steps in flambeau's own code, as far as they are known.

The order is the user's: 8-bit pixels are cropped and changed, then converted to floats, then erased. An
unknown transform is called as it is: in its position if it maps PIL images to PIL images, else together with
all that follow.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2

from flambeau.data.drop_in.cropping import (
    PixelStep,
    Source,
    mask_source,
    mask_step,
    source_of,
    whole,
)
from flambeau.data.drop_in.lazy_image import LazyImage
from flambeau.data.drop_in.sample_context import Sample, Seeds
from flambeau.data.drop_in.transform_kinds import (
    WEIGHTS_TRANSFORM,
    is_from_timm,
    is_one_of,
    parts_of_weights_transform,
)
from flambeau.data.drop_in.transforms import (
    call_on_image,
    draws_from_python,
    is_pointwise,
    keeps_levels,
    pixel_step,
    takes_pil_image,
)
from flambeau.data.transforms.color import uniform
from flambeau.images.channels import to_image
from flambeau.images.decode import Picture
from flambeau.images.native import kernel as native
from flambeau.images.pixels import Pixels

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


_CACHE_BYTES = 1 << 23  # a larger batch does not stay in a core's cache until it is used


class Levels(NamedTuple):
    """The result of pointwise transforms for each channel's 256 levels.

    Attributes:
        table: (C, 256) float32; None if levels stay levels.
        kind: the class of the result: torch.Tensor, or torchvision's Image.
        channels_last: whether a pixel's channels lie side by side, as in a PIL image.
    """

    table: NDArray[np.float32] | None
    kind: type
    channels_last: bool


@dataclass(eq=False)
class Plan:
    """The steps of one Compose, in their order.

    Attributes:
        pixel_steps: change pixels (H, W, C) uint8.
        pointwise: the user's transforms from levels to numbers.
        tail: the user's transforms from the first unknown one on.
        mask_steps: what `source` and the `pixel_steps` do to a mask; None if that is not known of all.
    """

    source: Source = whole
    pixel_steps: list[PixelStep] = field(default_factory=list)
    pointwise: list[Any] = field(default_factory=list)
    float_steps: list[FloatStep] = field(default_factory=list)
    tail: list[Any] = field(default_factory=list)
    mask_steps: list[PixelStep] | None = field(default_factory=list)
    draws_python: bool = False
    taken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    _levels: dict[int, "Levels | None"] = field(default_factory=dict)

    def takes(self, inputs: tuple[Any, ...]) -> bool:
        """Whether it can run on these arguments: an image, or with its mask."""
        if len(inputs) == 1:
            return True
        sides = inputs[0].height, inputs[0].width
        return self.mask_steps is not None and tuple(inputs[1].shape[-2:]) == sides

    def run(self, inputs: tuple[Any, ...], sample: Sample) -> Any:
        """The result of the user's Compose for an image, or for an image and its mask."""
        view, seeds = sample.next_view(draws_python=self.draws_python)
        value = self._run(inputs[0], view, seeds, sample)
        return value if len(inputs) == 1 else (value, self._masked(inputs[1], seeds))

    def _masked(self, mask: Any, seeds: Seeds) -> Any:
        """The mask after the steps, with the random numbers of its image."""
        assert self.mask_steps is not None
        *others, height, width = mask.shape
        pixels = mask.as_subclass(Tensor).reshape(-1, height, width).permute(1, 2, 0).numpy()
        for number, step in enumerate(self.mask_steps):
            pixels = step(pixels, seeds.of_step(number))
        plain = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
        value: Any = tv_tensors.wrap(plain.reshape(*others, *plain.shape[1:]), like=mask)
        for transform in self.pointwise:
            value = transform(value)
        return value

    def _run(self, image: Image.Image, view: int, seeds: Seeds, sample: Sample) -> Any:
        picture, channels = _picture(image)
        pixels = self.source(picture, channels, seeds.of_step(0))
        for number, step in enumerate(self.pixel_steps, start=1):
            pixels = step(pixels, seeds.of_step(number))
        levels = self.levels(pixels.shape[2]) if self.pointwise else None
        if levels is None:
            value: Any = to_image(pixels)
            for transform in self.pointwise:
                value = transform(value)
        else:
            value = self._as_tensor(pixels, levels, sample, view)
        for number, change in enumerate(self.float_steps, start=1):
            value = change(value, seeds.of_step(-number))
        for transform in self.tail:
            value = transform(value)
        return value

    def levels(self, channels: int) -> Levels | None:
        """What `pointwise` does to each level; None if not pointwise, or failing."""
        if channels not in self._levels:
            self._levels[channels] = self._find_levels(channels)
        return self._levels[channels]

    def _find_levels(self, channels: int) -> Levels | None:
        row = np.repeat(np.arange(256, dtype=np.uint8)[None, :, None], channels, axis=2)
        value: Any = to_image(row)
        try:
            for transform in self.pointwise:
                value = transform(value)
        except Exception:  # the user's own call will raise it again
            return None
        if not isinstance(value, Tensor) or value.shape != (channels, 1, 256):
            return None
        kind = type(value)
        plain = value.as_subclass(Tensor)
        last = channels > 1 and plain.stride(0) == 1
        if plain.dtype == torch.float32:
            return Levels(plain[:, 0].contiguous().numpy(), kind, last)
        same = plain.dtype == torch.uint8 and bool((plain[:, 0] == torch.arange(256)).all())
        return Levels(None, kind, last) if same else None

    def _as_tensor(self, pixels: Pixels, levels: Levels, sample: Sample, view: int) -> Tensor:
        raw = sample.raw and not self.float_steps and not self.tail
        dtype = torch.uint8 if raw or levels.table is None else torch.float32
        shape = torch.Size((pixels.shape[2], *pixels.shape[:2]))
        out = sample.slot(view, shape, dtype, channels_last=levels.channels_last)
        if levels.table is None or raw:
            out.permute(1, 2, 0).numpy()[:] = pixels
            if raw and levels.table is not None and sample.memory is not None:
                sample.memory.tables[view, shape, dtype] = levels.table
        else:
            _write_floats(pixels, levels.table, out)
        return out if levels.kind is Tensor else out.as_subclass(levels.kind)


def plan_of(compose: Any, *, is_copied: bool = False) -> Plan | None:
    """The plan of torchvision's Compose; None if no transform can be taken over.

    `is_copied`: later changes of the transforms do not reach it, if all are known and can be copied.
    """
    if is_copied and (plan := plan_of(compose)) is not None and not plan.left:
        try:
            return plan_of(deepcopy(compose))
        except TypeError:  # it holds what cannot be copied, such as a lock
            return plan
    plan = Plan()
    is_float = False
    transforms = _flat(compose, is_whole=True)
    of_masks: list[PixelStep | None] = []
    plan.draws_python = any(draws_from_python(one) for one in transforms)
    while transforms and is_pointwise(transforms[0]) and keeps_levels(transforms[0]):
        plan.pointwise.append(transforms[0])
        plan.taken.append(_name(transforms.pop(0)))
    first = source_of(transforms, of_tensor=bool(plan.pointwise))
    if first is not None:
        plan.source, count = first
        of_masks.append(mask_source(transforms[:count]))
        plan.taken += map(_name, transforms[:count])
        transforms = transforms[count:]
    for number, transform in enumerate(transforms):
        step: Any = None
        if is_pointwise(transform) and plan.float_steps:  # after an erasing, in the user's order
            plan.float_steps.append(_call(transform))
        elif is_pointwise(transform):
            plan.pointwise.append(transform)
            is_float = is_float or not keeps_levels(transform)
        elif is_float and (step := erasing(transform)):
            plan.float_steps.append(step)
        elif not is_float and (step := pixel_step(transform, of_tensor=bool(plan.pointwise))):
            plan.pixel_steps.append(step)
            of_masks.append(mask_step(transform))
        elif not is_float and not plan.pointwise and takes_pil_image(transform):
            plan.pixel_steps.append(call_on_image(transform))
            plan.left.append(_name(transform))
            continue
        else:
            plan.tail = transforms[number:]
            plan.left += [_name(t) for t in plan.tail]
            break
        plan.taken.append(_name(transform))
    plan.mask_steps = None
    if isinstance(compose, v2.Compose) and not (plan.left or plan.float_steps):
        known = [step for step in of_masks if step is not None]
        if len(known) == len(of_masks):
            plan.mask_steps = known if first is not None else [_unchanged, *known]
    return plan if plan.taken else None


def _unchanged(pixels: Pixels, seeds: Seeds) -> Pixels:
    return pixels


def can_take(inputs: tuple[Any, ...]) -> bool:
    """Whether a plan can run on a PIL image, RGB or grey of 8 bits, and perhaps a mask."""
    if not inputs or not isinstance(inputs[0], Image.Image) or inputs[0].mode not in ("RGB", "L"):
        return False
    if len(inputs) == 1:
        return True
    mask = inputs[1]
    return len(inputs) == 2 and type(mask) is tv_tensors.Mask and mask.ndim > 1 and mask.is_cpu


def _picture(image: Image.Image) -> tuple[Picture, int]:
    channels = 3 if image.mode == "RGB" else 1
    if isinstance(image, LazyImage) and not image.is_left_to_pil:
        return image.picture, channels
    return Picture(np.asarray(image)), channels


def _write_floats(pixels: Pixels, table: NDArray[np.float32], out: Tensor) -> None:
    planes = out.is_contiguous()
    target = out.numpy() if planes else out.permute(1, 2, 0).numpy()
    kernel = native.kernel()
    if kernel is not None:
        stream = out.untyped_storage().nbytes() > _CACHE_BYTES
        kernel.to_floats(np.ascontiguousarray(pixels), table, target, planes=planes, stream=stream)
        return
    for channel in range(len(table)):
        values = table[channel][pixels[:, :, channel]]
        target[(channel,) if planes else (..., channel)] = values


def _call(transform: Any) -> FloatStep:
    def step(x: Tensor, seeds: Seeds) -> Tensor:
        changed: Tensor = transform(x)
        return changed

    return step


def _flat(transform: Any, *, is_whole: bool = False) -> list[Any]:
    """The transforms of a pipeline, one by one; with `is_whole`, of a class derived from Compose, too."""
    if is_one_of(transform, WEIGHTS_TRANSFORM) or (
        is_whole and type(transform) is WEIGHTS_TRANSFORM
    ):
        return parts_of_weights_transform(transform)
    if is_whole or is_one_of(transform, v1.Compose, v2.Compose):
        return [one for part in transform.transforms for one in _flat(part)]
    return [transform]


def _name(transform: Any) -> str:
    return type(transform).__name__
