"""Values for settings that were left open, chosen from the data and the machine."""

import dataclasses
import math
from typing import Any

import torch

from flambeau.data.datasets.image_dataset import SMALL_SIDE
from flambeau.data.datasets.image_statistics import mean_std, probe
from flambeau.data.loading.stream_order import STREAMS
from flambeau.data.sources.source import (
    Source,
    content_sample,
    has_unit,
    mask_problem,
    mask_values,
    names_digest,
    pixel_kind,
)
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import separator_of, task_of
from flambeau.data.sources.wide_source import COLORS, found_format, of_kind, require_channels
from flambeau.data.transforms.crops import TrainingCrop
from flambeau.errors import InputError
from flambeau.parallel.ranks import local_world
from flambeau.recipes.setup.environment import native_bf16, usable_cpus
from flambeau.recipes.training.schedules import linear_scaled_lr
from flambeau.run.loop.lr_schedule import FACTOR, PATIENCE
from flambeau.run.loop.model_builder import model_file_sha256
from flambeau.run.options.named_schedule import GAMMA
from flambeau.trainer.parts.class_weights import class_weights
from flambeau.trainer.parts.data import DataFacts, teacher_sha256
from flambeau.trainer.parts.device import pick_device
from flambeau.trainer.parts.epoch_order import shuffle_window
from flambeau.trainer.parts.fine_tuning import weights_normalization
from flambeau.trainer.parts.model import SMALL, TINY, input_channels, pretrained_normalization
from flambeau.trainer.parts.optimizer import usual_lr
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import (
    BETAS,
    FIELDS,
    MOMENTUM,
    Settings,
    parse_batch_size,
)
from flambeau.trainer.tasks.all_tasks import TASK_TYPES

EMBEDDED_EPOCHS = 4
EMBEDDED_WARMUP = "25%"
"""val_accuracy of tiny_convnet at a batch of 64, means of 8 seeds (of 5 and 4 epochs with 10 %: 4 seeds):
4 epochs with 25 % 90.0 %, with 40 % 89.5, with 10 % 89.0; 5 with 10 % 89.6; 3 with 33 % 88.6."""


def resolve(settings: Settings, train: Source, val: Source) -> tuple[ResolvedSettings, DataFacts]:
    """Fill in what was left open, also bits and channels; and the facts of the data."""
    settings = _of_task(_with_embedded(settings), task_of(train))
    for source in (train, val):
        _require_masks(source, settings.skip_bad_images)
    format_ = found_format(train, channels=settings.channels, bits=settings.bits)
    require_channels(val, format_.stacked_channels, "the training images")
    train, val = (of_kind(source, *format_) for source in (train, val))
    seen = probe(train)
    probe(val)  # fails now, instead of after the first epoch, if nothing of it can be read
    size = settings.image_size or _image_size(seen.same_size, seen.median_shorter_side)
    if settings.start_size is not None and settings.start_size > size:
        raise InputError(
            f"start_size = {settings.start_size} is above the image size, {size}: choose a smaller one"
        )
    small = size <= SMALL_SIDE
    convnet = TINY if settings.data is None else SMALL
    own_choice = convnet if small and not settings.pretrained else "resnet18"
    model = settings.model or TASK_TYPES[task_of(train)].default_model or own_choice
    channels = format_.stacked_channels or settings.channels
    channels = channels or input_channels(model, grey=seen.grey)
    _check_colors(settings, channels)
    device = _device(settings)
    batch_size = parse_batch_size(settings.batch_size).num or _batch_size(
        len(train), settings.accumulate, small=small
    )
    workers = 0 if small or device.type == "cpu" else min(max(1, usable_cpus() // local_world()), 8)
    precision = "fp32"
    if native_bf16(device) and settings.portable_bits is None:
        precision = "bf16"
    elif device.type == "cuda":
        precision = "fp16"
    per_pixel = TASK_TYPES[task_of(train)].per_pixel
    # Not cropped: see ImageDataset.
    shifted = small and seen.same_size == (size, size) and not per_pixel
    _check_crop(settings, size, shifted=shifted)
    chosen: dict[str, Any] = dict(
        image_size=size,
        channels=channels,
        bits={"uint8": 8, "uint16": 16}.get(format_.kind),
        model=model,
        device=device.type if settings.device == "auto" else settings.device,
        batch_size=batch_size,
        workers=workers if settings.workers is None else settings.workers,
        crop_scale=None
        if shifted
        else settings.crop_scale or TASK_TYPES[task_of(train)].crop_scale,
        padding=_padding(settings, size, task_of(train)) if shifted else None,
        duration=settings.duration or _duration(settings),
        warmup=settings.warmup or "10%",
        lr=settings.lr
        or _lr(settings, model, min(batch_size * settings.accumulate, len(train)), task_of(train)),
        precision=precision if settings.precision == "auto" else settings.precision,
        shuffle_window=shuffle_window(settings, train),
        **_dependent_settings(settings),
        **_task_settings(settings, train),
    )
    resolved = ResolvedSettings(**{**dataclasses.asdict(settings), **chosen})
    return resolved, _facts(resolved, train, val, channels=channels)


def _require_masks(source: Source, skip_bad_images: int) -> None:
    """InputError for more bad masks than may be skipped."""
    if not mask_values(source):
        return
    found = ((index, mask_problem(source, index)) for index in range(len(source)))
    problems = [(index, why) for index, why in found if why is not None]
    if len(problems) > skip_bad_images:
        index, why = problems[0]
        more = f" (and {len(problems) - 1} more like it)" if len(problems) > 1 else ""
        raise InputError(
            f"{source.describe(index)}: {why}{more}\n"
            "Correct or remove it, or allow N bad images with --skip-bad-images N"
        )


def _check_colors(settings: Settings, channels: int) -> None:
    """Refuse what changes colors where there are none."""
    if channels not in COLORS and settings.color_jitter:
        raise InputError(
            f"color_jitter = {settings.color_jitter} changes brightness and colors, which images of "
            f"{channels} channels have not: leave it out; crops, flips, augment, random_erasing, mixup and "
            "cutmix take any channels"
        )


def _task_settings(settings: Settings, train: Source) -> dict[str, Any]:
    """The settings that depend on the task, or are refused by it."""
    name = task_of(train)
    task = TASK_TYPES[name]
    for setting, why in task.refuses.items():
        if getattr(settings, setting) != FIELDS[setting].default:
            raise InputError(f"{setting} has no place in a {name} task, as {why}: leave it out")
    for setting, known in (("loss", task.losses), ("best", task.best_figures)):
        value = getattr(settings, setting)
        if value not in (None, *known):
            raise InputError(
                f"{setting} = {value!r} is not for a {name} task: choose one of {', '.join(known)}"
            )
    smoothing = settings.label_smoothing
    return {
        "task": name,
        "label_separator": separator_of(train),
        "loss": settings.loss or task.losses[0],
        "best": settings.best or task.best_figures[0],
        "label_smoothing": task.default_smoothing if smoothing is None else smoothing,
    }


def _device(settings: Settings) -> torch.device:
    if settings.portable_bits is not None:
        return torch.device("cpu")
    try:
        return pick_device(settings.device)
    except InputError as error:
        if settings.preset is None or settings.device != "cuda":
            raise
        raise InputError(
            f"preset = {settings.preset!r} is for a GPU, and {error}; --device cpu does without, in minutes "
            "instead of seconds"
        ) from error


def _with_embedded(settings: Settings) -> Settings:
    if settings.data is not None:
        return settings
    return dataclasses.replace(
        settings,
        batch_size=parse_batch_size(settings.batch_size).num or 64,
        duration=settings.duration or f"{EMBEDDED_EPOCHS}ep",
        warmup=settings.warmup or EMBEDDED_WARMUP,
    )


def _of_task(settings: Settings, name: TaskName) -> Settings:
    """With the optimizer and the changes to images that suit the task."""
    task = TASK_TYPES[name]
    flip = settings.flip
    if flip is None:
        flip = settings.alternate_flip or task.mirrors
    return dataclasses.replace(
        settings, optimizer=settings.optimizer or task.default_optimizer, flip=flip
    )


def _check_crop(settings: Settings, size: int, *, shifted: bool) -> None:
    if settings.preset is not None and not shifted:
        raise InputError(
            f"preset = {settings.preset!r} is for images that are all squares of one size, at most "
            f"{SMALL_SIDE} px, and these are trained as {size} px from others: leave it out, as for photos"
        )
    without_effect = "crop_scale" if shifted else "padding"
    if getattr(settings, without_effect) is not None:
        are = "are" if shifted else "are not"
        raise InputError(
            f"{without_effect} has no effect on images that {are} all of {size} x {size}, and at most "
            f"{SMALL_SIDE}: leave it out"
        )
    if shifted and settings.crop != "bilinear" and settings.eval_size in (None, size):
        raise InputError(
            f"crop = {settings.crop!r} has no effect on images that are all of {size} x {size}; they are not "
            "resized: leave it out"
        )
    if settings.padding is not None and settings.padding >= size:
        raise InputError(f"padding = {settings.padding} must be below the image size, {size}")


def _padding(settings: Settings, size: int, task: TaskName) -> int:
    if settings.padding is not None:
        return settings.padding
    if TASK_TYPES[task].crop_scale == 1.0:
        return 0
    # Embedded data: 90.5, 89.4 and 87.5 % with 0, 1 and 3 (tiny_convnet, 6 epochs, 5, 5 and 3 seeds), as so
    # few epochs hardly repeat an image.
    return 0 if settings.data is None else TrainingCrop().padding_of(size)


def _facts(settings: ResolvedSettings, train: Source, val: Source, *, channels: int) -> DataFacts:
    model = settings.model
    # Floats in an unknown unit, perhaps normalized already, are normalized by their own mean; 16-bit levels,
    # of which most files use a part, too.
    kind = pixel_kind(train)
    learned_with = None
    if settings.pretrained and has_unit(kind):
        learned_with = pretrained_normalization(model, channels=channels)
    elif settings.weights is not None and has_unit(kind):
        learned_with = weights_normalization(settings.weights, channels=channels)
    mean, std = learned_with or mean_std(train, channels=channels)
    return DataFacts(
        **_target_facts(settings, train),
        classes=list(train.classes),
        channels=channels,
        mean=mean,
        std=std,
        train_samples=len(train),
        val_samples=len(val),
        train_fingerprint=train.fingerprint,
        val_fingerprint=val.fingerprint,
        model_file_sha256=model_file_sha256(model),
        teacher_sha256=teacher_sha256(settings.teacher),
        class_weights=class_weights(settings, train),
        pixels=kind,
        train_content=content_sample(train),
        val_content=content_sample(val),
        train_names=names_digest(train),
        shuffle_streams=STREAMS,
    )


def _target_facts(settings: ResolvedSettings, train: Source) -> dict[str, Any]:
    """What a task other than classification needs to know of the targets."""
    name = task_of(train)
    facts = TASK_TYPES[name].target_facts(train)
    return {"task_name": name, "loss": settings.loss, **facts} if facts else {}


def _image_size(same_size: tuple[int, int] | None, shorter_side: int) -> int:
    if same_size is not None and same_size[0] == same_size[1] <= SMALL_SIDE:
        return max(8, same_size[0])
    # Photos: their size, rounded down to the stride of common networks.
    return max(32, min(224, shorter_side // 32 * 32))


def _batch_size(num_samples: int, accumulate: int, *, small: bool) -> int:
    """128 for small images, else 64, or the power of two that gives eight steps per epoch. Chosen.

    Slightly more if an epoch would end with a batch of one image, from which BatchNorm cannot learn.
    """
    size = 128 if small else 64
    while size > 2 and size * 8 > num_samples:
        size //= 2
    while num_samples % (size * accumulate) == 1:
        size += 1
    return size


def _duration(settings: Settings) -> str:
    return "10ep" if settings.pretrained or settings.weights else "30ep"


def _dependent_settings(settings: Settings) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if settings.teacher is not None:
        chosen["teacher_weight"] = settings.teacher_weight or 0.5
        chosen["temperature"] = settings.temperature or 4.0
    if settings.momentum is None:
        chosen["momentum"] = MOMENTUM.get(settings.optimizer or "")
    if settings.betas is None and settings.optimizer in BETAS:
        chosen["betas"] = "0.9,0.999"
    if settings.gamma is None:
        chosen["gamma"] = GAMMA.get(settings.schedule)
    if settings.schedule == "plateau":
        if settings.patience is None:
            chosen["patience"] = PATIENCE
        if settings.plateau_factor is None:
            chosen["plateau_factor"] = FACTOR
    return chosen


def _lr(settings: Settings, model: str, global_batch: int, name: TaskName) -> float:
    optimizer = settings.optimizer
    assert optimizer is not None
    task = TASK_TYPES[name]
    base, largest = usual_lr(optimizer, model)
    if settings.pretrained or settings.weights:
        base /= 100 if settings.qat else 10
    if optimizer in ("sgd", "rmsprop"):  # the others do not depend on the gradient's size
        base *= task.lr_share if optimizer == "sgd" else min(task.lr_share, 1.0)
    if optimizer in ("adam", "adamw") and task.adam_lr_share is not None:
        scaled = base * task.adam_lr_share * math.sqrt(global_batch / 256)
    else:
        scaled = linear_scaled_lr(base, global_batch)
    return float(f"{min(scaled, largest):.4g}")
