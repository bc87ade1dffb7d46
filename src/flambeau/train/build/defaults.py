"""Settings that were left open, chosen from the data and the machine, and written down as values."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flambeau.data.transforms.crops import CROP_SCALE
from flambeau.data.transforms.augmentation import Augmentation
from flambeau.data.datasets.image_dataset import SMALL_SIDE, ImageDataset, mean_std, probe
from flambeau.errors import InputError
from flambeau.data.datasets.device_dataset import HeldDataset, can_hold
from flambeau.data.sources.source import Source
from flambeau.data.sources.open_data import open_sources
from flambeau.parallel.ranks import local_world
from flambeau.recipes.setup.environment import native_bf16, usable_cpus
from flambeau.recipes.training.schedules import linear_scaled_lr
from flambeau.train.settings.settings import Settings
from flambeau.train.build.device import pick_device
from flambeau.train.checkpoints.run_folder import RunFolder
from flambeau.train.loop.lr_schedule import FACTOR, PATIENCE
from flambeau.train.build.model import SMALL, input_channels, pretrained_normalization
from flambeau.train.build.optimizer import BASE_LR, SMALL_LR
from flambeau.train.checkpoints.published_weights import published
from flambeau.train.settings.checks import MOMENTUM

# Where small images are held. Not on a CPU, where it saves nothing: a batch of 128 of Fashion-MNIST takes
# 0.79 ms instead of 0.82 ms, and its step over 100 ms (one core of an EPYC).
_HOLDING = {"cuda"}


@dataclass(frozen=True)
class DataFacts:
    """What the data are: kept in dataset.json, for predictions and to see whether they have changed.

    Attributes:
        classes: names, in the order of the logits.
        channels: 1 or 3.
        mean, std: a channel, of pixels in [0, 1].
        train_samples, val_samples: how many.
        train_fingerprint, val_fingerprint: hex SHA-256 of what the sources say of themselves.
        model_file_sha256: of FILE.py where the model comes from one, else None.
        teacher_sha256: of the weights of the teacher, where there is one.
    """

    classes: list[str]
    channels: int
    mean: list[float]
    std: list[float]
    train_samples: int
    val_samples: int
    train_fingerprint: str
    val_fingerprint: str
    model_file_sha256: str | None
    teacher_sha256: str | None = None

    def as_json(self) -> bytes:
        """The content of dataset.json."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> "DataFacts":
        """What `as_json` wrote.

        Raises:
            InputError: the file is missing or something else.
        """
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(
                f"{path} cannot be read ({error}): is {path.parent} a run of flambeau train?"
            ) from error


def resolve(settings: Settings, train: Source, val: Source) -> tuple[Settings, DataFacts]:
    """Fill in what was left open.

    Args:
        settings: as given.
        train, val: its sources.

    Returns:
        Settings without a None, and the facts of the data.

    Raises:
        InputError: settings that do not go with these data.
    """
    seen = probe(train)
    probe(val)  # refused now rather than after the first epoch, if none of it can be read
    size = settings.image_size or _image_size(seen.same_size, seen.median_shorter_side)
    small = size <= SMALL_SIDE
    model = settings.model or (SMALL if small and not settings.pretrained else "resnet18")
    channels = input_channels(model, grey=seen.grey)
    device = pick_device(settings.device)
    batch_size = settings.batch_size or _batch_size(len(train), settings.accumulate, small=small)
    workers = 0 if small or device.type == "cpu" else min(max(1, usable_cpus() // local_world()), 8)
    precision = "fp32"
    if native_bf16(device):
        precision = "bf16"
    elif device.type == "cuda":
        precision = "fp16"
    moved = small and seen.same_size == (size, size)  # not cropped: see ImageDataset
    if moved and settings.crop_scale is not None:
        raise InputError(
            f"crop_scale has no effect on images that are all of {size} x {size}: leave it out"
        )
    resolved = dataclasses.replace(
        settings,
        image_size=size,
        model=model,
        device=device.type if settings.device == "auto" else settings.device,
        batch_size=batch_size,
        workers=workers if settings.workers is None else settings.workers,
        crop_scale=None if moved else settings.crop_scale or CROP_SCALE[0],
        duration=settings.duration or _duration(settings),
        lr=settings.lr or _lr(settings, model, min(batch_size * settings.accumulate, len(train))),
        precision=precision if settings.precision == "auto" else settings.precision,
        **_of_choices(settings),
    )
    return resolved, _facts(resolved, train, val, model=model, channels=channels)


def _facts(
    settings: Settings, train: Source, val: Source, *, model: str, channels: int
) -> DataFacts:
    published = pretrained_normalization(model, channels=channels) if settings.pretrained else None
    mean, std = published or mean_std(train, channels=channels)
    return DataFacts(
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
    )


def open_data(settings: Settings) -> tuple[Source, Source]:
    """The sources of a run, for training and for validation.

    Raises:
        InputError: data that cannot be opened.
    """
    # A hold-out must not change with the seed, or a second run would be measured on what the first learned.
    path = None if settings.data is None else Path(settings.data)
    return open_sources(path, seed=0, download=settings.download)


def reopen_data(settings: Settings, facts_path: Path) -> tuple[Source, Source, DataFacts]:
    """The sources and facts of a run that exists, which must be as they were.

    Args:
        settings: of the run.
        facts_path: its dataset.json.

    Raises:
        InputError: the data or the model's file have changed, or cannot be opened.
    """
    facts = DataFacts.read(facts_path)
    train, val = open_data(settings)
    assert settings.model is not None
    check_unchanged(facts, train, val, model=settings.model)
    return train, val, facts


def check_unchanged(facts: DataFacts, train: Source, val: Source, *, model: str) -> None:
    """Refuse to go on with a run on other data than it was started with.

    Raises:
        InputError: something is different.
    """
    for what, source, samples, fingerprint in (
        ("training", train, facts.train_samples, facts.train_fingerprint),
        ("validation", val, facts.val_samples, facts.val_fingerprint),
    ):
        if source.fingerprint != fingerprint:
            raise InputError(
                f"the {what} data have changed since the run was started ({samples} images then, "
                f"{len(source)} now); restore them, or start again with --fresh or another --out"
            )
    if model_file_sha256(model) != facts.model_file_sha256:
        raise InputError(
            f"{model.rpartition(':')[0]} has changed since the run was started; "
            "restore it, or start again with --fresh or another --out"
        )


def datasets(
    settings: Settings, facts: DataFacts, train: Source, val: Source
) -> tuple[ImageDataset | HeldDataset, ImageDataset | HeldDataset]:
    """The two data sets of a run: held on its device where that pays and nothing asks for the CPU."""
    assert settings.image_size is not None
    shape: Mapping[str, Any] = {"image_size": settings.image_size, "channels": facts.channels}
    augmentation = Augmentation(settings.augment, settings.color_jitter)
    device = pick_device(settings.device)
    # Worker processes have been asked for, and would not be used.
    holds = device.type in _HOLDING and not settings.workers

    def make(source: Source, *, train: bool) -> ImageDataset | HeldDataset:
        common = {
            **shape,
            "train": train,
            "skip_bad": settings.skip_bad_images > 0,
            "flip": settings.flip,
        }
        if holds and not (train and augmentation) and can_hold(source, **shape):
            return HeldDataset(source, device=device, **common)
        crop_scale = (settings.crop_scale or CROP_SCALE[0], CROP_SCALE[1])
        return ImageDataset(source, augmentation=augmentation, crop_scale=crop_scale, **common)

    return make(train, train=True), make(val, train=False)


def model_file_sha256(model: str) -> str | None:
    """The hash of the file in 'FILE.py:FUNCTION'; None for other names."""
    path = Path(model.rpartition(":")[0])
    if ".py:" not in model or not path.is_file():
        return None
    return hashlib.sha256(path.read_bytes()).hexdigest()


def teacher_sha256(teacher: str | None) -> str | None:
    """The hash of the weights of a teacher.

    Raises:
        InputError: not the folder of a finished run.
    """
    if teacher is None:
        return None
    folder = RunFolder(Path(teacher))
    if not folder.path.is_dir() or folder.read_config() is None or published(folder) is None:
        raise InputError(f"teacher = {teacher!r} is not the folder of a finished run")
    return hashlib.sha256(folder.weights.read_bytes()).hexdigest()


def _image_size(same_size: tuple[int, int] | None, shorter_side: int) -> int:
    if same_size is not None and same_size[0] == same_size[1] <= SMALL_SIDE:
        return max(8, same_size[0])
    # Photos: as large as they are, in steps of 32, which is the stride of the usual networks.
    return max(32, min(224, shorter_side // 32 * 32))


def _batch_size(num_samples: int, accumulate: int, *, small: bool) -> int:
    """128 for small images, else 64, or the power of two that gives eight steps an epoch. Chosen.

    A bit more where an epoch would end with a batch of one image: BatchNorm learns nothing from one.
    """
    size = 128 if small else 64
    while size > 2 and size * 8 > num_samples:
        size //= 2
    while num_samples % (size * accumulate) == 1:
        size += 1
    return size


def _duration(settings: Settings) -> str:
    if settings.data is None:
        return "16ep"  # 90.6 % with seed 0; chosen among 8 to 24
    return "10ep" if settings.pretrained or settings.weights else "30ep"


def _of_choices(settings: Settings) -> dict[str, Any]:
    """What only some optimizers and schedules, and a teacher, have."""
    chosen: dict[str, Any] = {}
    if settings.teacher is not None:
        chosen["teacher_weight"] = settings.teacher_weight or 0.5
        chosen["temperature"] = settings.temperature or 4.0
    if settings.momentum is None:
        chosen["momentum"] = MOMENTUM.get(settings.optimizer)
    if settings.schedule == "plateau":
        if settings.patience is None:
            chosen["patience"] = PATIENCE
        if settings.plateau_factor is None:
            chosen["plateau_factor"] = FACTOR
    return chosen


def _lr(settings: Settings, model: str, global_batch: int) -> float:
    base = SMALL_LR.get(settings.optimizer) if model == SMALL else None
    base = base or BASE_LR[settings.optimizer]
    if settings.pretrained or settings.weights:
        base /= 10
    return float(f"{linear_scaled_lr(base, global_batch):.4g}")
