"""The settings of `flambeau train` as keyword arguments, for type checkers and editors."""

from typing import TypedDict


class SettingsKeywords(TypedDict, total=False):
    """The fields of Settings but `data` and `track`, which `train` names itself; a test compares the two."""

    image_size: int | None
    eval_size: int | None
    crop: str
    download: bool
    skip_bad_images: int
    flip: bool
    crop_scale: float | None
    padding: int | None
    augment: str
    color_jitter: float
    random_erasing: float
    balance: str
    workers: int | None
    retry_workers: int
    model: str | None
    pretrained: bool
    weights: str | None
    drop_path: float
    recompute: str
    compile: str
    ema: float
    freeze: str
    head_lr: float | None
    layer_decay: float
    teacher: str | None
    teacher_weight: float | None
    temperature: float | None
    qat: bool
    epochs: int | None
    duration: str | None
    extend: str | None
    batch_size: int | str | None
    early_stop: int
    accumulate: int
    optimizer: str
    momentum: float | None
    betas: str | None
    lr: float | None
    weight_decay: float
    schedule: str
    milestones: str | None
    gamma: float | None
    warmup: str
    patience: int | None
    plateau_factor: float | None
    clip_norm: float
    label_smoothing: float
    class_weights: str | None
    mixup: float
    cutmix: float
    on_nan: str
    precision: str
    device: str
    seed: int
    parts: int | None
    sync_bn: bool
    shard: str
    compression: str
    stop_within: str | None
    stall_timeout: float
    checkpoint_every: str
    keep: int
    log_every: int
