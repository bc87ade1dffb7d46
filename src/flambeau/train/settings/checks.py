"""What is refused of settings: values out of range, contradictions, and what would do nothing."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from flambeau.errors import InputError, nearest
from flambeau.train.settings.durations import parse_duration

if TYPE_CHECKING:
    from flambeau.train.settings.settings import Settings

MOMENTUM = {"sgd": 0.9, "rmsprop": 0.9, "muon": 0.95}
"""The momentum of the optimizers that take one, where it is left open."""


def check_ranges(s: "Settings", choices: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse values out of range.

    Args:
        s: the settings.
        choices: the words that a setting may be, by its name.

    Raises:
        InputError: there is one.
    """
    for name, value in vars(s).items():
        if name in choices and value not in choices[name]:
            hint = nearest(str(value), choices[name])
            raise InputError(
                f"{name} must be one of {', '.join(choices[name])}; got {value!r}{hint}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name} must be a finite number, got {value}")
    for name, low in {
        "image_size": 8, "skip_bad_images": 0, "workers": 0, "epochs": 1, "batch_size": 1,
        "accumulate": 1, "keep": 1, "log_every": 1, "weight_decay": 0, "clip_norm": 0,
        "mixup": 0, "cutmix": 0, "seed": 0, "stall_timeout": 0, "patience": 0,
    }.items():  # fmt: skip
        value = getattr(s, name)
        if value is not None and value < low:
            raise InputError(f"{name} must be at least {low}, got {value}")
    if s.seed >= 1 << 64:
        raise InputError(f"seed must be below 2**64, got {s.seed}")
    for name in ("mixup", "cutmix"):
        alpha = getattr(s, name)
        if alpha and not 1e-6 <= alpha <= 1e6:  # beyond, a Beta(alpha, alpha) cannot be drawn
            raise InputError(f"{name} must be 0 or from 1e-06 to 1e+06, got {alpha}")
    if s.lr is not None and s.lr <= 0:
        raise InputError(f"lr must be above 0, got {s.lr}")
    for name in ("random_erasing", "color_jitter"):
        if not 0 <= getattr(s, name) <= 1:
            raise InputError(f"{name} must be from 0 to 1, got {getattr(s, name)}")
    if s.plateau_factor is not None and not 0 < s.plateau_factor < 1:
        raise InputError(f"plateau_factor must be above 0 and below 1, got {s.plateau_factor}")
    for name in ("head_lr", "temperature"):
        if (value := getattr(s, name)) is not None and value <= 0:
            raise InputError(f"{name} must be above 0, got {value}")
    for name in ("layer_decay", "teacher_weight", "crop_scale"):
        if (value := getattr(s, name)) is not None and not 0 < value <= 1:
            raise InputError(f"{name} must be above 0 and at most 1, got {value}")
    for name in ("ema", "label_smoothing", "momentum", "drop_path"):
        if not 0 <= (getattr(s, name) or 0) < 1:
            raise InputError(f"{name} must be at least 0 and below 1, got {getattr(s, name)}")


def check_together(s: "Settings") -> None:
    """Refuse durations that are none, and settings that contradict each other.

    Raises:
        InputError: there are some.
    """
    if s.epochs is not None and s.duration is not None:
        raise InputError(
            f"epochs = {s.epochs} and duration = {s.duration!r} contradict each other: give one of them"
        )
    if s.shard != "none" and s.compression != "none":
        raise InputError(
            f"compression = {s.compression!r} has no effect with shard = {s.shard!r}: leave one of them out"
        )
    if s.pretrained and s.weights is not None:
        raise InputError("pretrained and weights contradict each other: give one of them")
    if s.pretrained and s.model is not None and (s.model == "small_convnet" or ".py:" in s.model):
        raise InputError(
            f"pretrained needs a timm or torchvision model: there are no published weights of {s.model}"
        )
    warmup = parse_duration(s.warmup, name="warmup", units="% ep st")
    if s.duration is not None:
        length = parse_duration(s.duration, name="duration")
        if length.amount <= 0:
            raise InputError(f"duration must be above 0, got {s.duration!r}")
        if warmup.unit == length.unit and warmup.amount >= length.amount:
            raise InputError(f"warmup = {s.warmup!r} is not shorter than duration = {s.duration!r}")
    if warmup.unit == "%" and warmup.amount >= 100:
        raise InputError(f"warmup = {s.warmup!r} leaves nothing of the run")
    if parse_duration(s.checkpoint_every, name="checkpoint_every").amount <= 0:
        raise InputError(f"checkpoint_every must be above 0, got {s.checkpoint_every!r}")


def check_takes_effect(s: "Settings") -> None:
    """Refuse settings of something that is not chosen.

    Raises:
        InputError: there is one.
    """
    for name in ("patience", "plateau_factor"):
        if getattr(s, name) is not None and s.schedule != "plateau":
            raise InputError(f"{name} has no effect with schedule = {s.schedule!r}: leave it out")
    if s.momentum is not None and s.optimizer not in MOMENTUM:
        raise InputError(f"momentum has no effect with optimizer = {s.optimizer!r}: leave it out")
    for name in ("teacher_weight", "temperature"):
        if getattr(s, name) is not None and s.teacher is None:
            raise InputError(f"{name} has no effect without a teacher: leave it out")
    if s.shard != "none" and s.optimizer == "muon":
        raise InputError(
            f"shard = {s.shard!r} leaves each process a piece of a matrix, and optimizer = 'muon' needs "
            "whole ones: leave one of them out"
        )
