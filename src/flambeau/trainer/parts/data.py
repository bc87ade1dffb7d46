"""The data sets of a run: opened, compared with those at its start, and made into batches."""

import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from flambeau.data.datasets.device_dataset import DeviceDataset, can_hold
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.sources.fold_name import parse_fold, parse_test
from flambeau.data.sources.folds import part_to_test
from flambeau.data.sources.open_data import (
    EMBEDDED,
    open_parts,
    open_source,
    open_sources,
    require_apart,
)
from flambeau.data.sources.source import (
    PixelKind,
    Source,
    content_sample,
    file_of,
    pixel_kind,
    require_unit,
)
from flambeau.data.sources.target_kinds import KINDS
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import TargetChoice
from flambeau.data.sources.wide_source import COLORS, of_kind
from flambeau.data.stores.address import is_address
from flambeau.data.stores.block_cache import CacheOptions, chosen_cache, parse_bytes
from flambeau.data.transforms.auto_augment import Augmentation
from flambeau.data.transforms.crops import CROP_SCALE, TrainingCrop
from flambeau.errors import InputError, unreadable
from flambeau.provenance import Permission
from flambeau.regular_file import read_file
from flambeau.run.folder.json_file import dataset_facts, json_file
from flambeau.run.folder.published_weights import published
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.folder.store_run import run_here
from flambeau.run.loop.model_builder import model_file_sha256
from flambeau.trainer.parts.class_weights import class_weights
from flambeau.trainer.parts.device import pick_device
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import Settings, split_names, teacher_runs
from flambeau.trainer.tasks.classification import Classification
from flambeau.trainer.tasks.multilabel import Multilabel
from flambeau.trainer.tasks.regression import Regression
from flambeau.trainer.tasks.segmentation import Segmentation
from flambeau.trainer.tasks.task import Task
from flambeau.user_code import is_function

EVALUATION = "evaluation.json"
"""What a run keeps of the evaluation of the weights that it publishes."""
# Devices that hold small images. Not a CPU, where it saves nothing: a batch of 128 of Fashion-MNIST takes
# 0.79 ms instead of 0.82 ms, and its step over 100 ms (one core of an EPYC).
_HOLDING = {"cuda"}


class DataChanged(InputError):
    """The data of a run, or the file of its model, are others than at its start."""


@dataclass(frozen=True)
class DataFacts:
    """Facts about the data, in dataset.json, for predictions and to detect changes.

    Attributes:
        mean, std: per channel, of pixels in [0, 1].
        train_fingerprint, val_fingerprint: hex SHA-256 of what the sources report.
        teacher_sha256: see the function.
        pixels: their kind; mean and std of 'float' and 'uint16' are in the unit of the data.
        train_content, val_content: hex SHA-256 of a sample of the files, if the fingerprint is of names and
            sizes; None in version 0.1.
        train_names: hex SHA-256 of the training images' names and labels, which packing keeps.
        known: share of the training images (of masks, pixels) of which each label or number is known; None:
            all.
        whole_images: an evaluation shows images whole, where a task does not always.
        thresholds: probability from which on each label is predicted, once chosen.
        test_samples, test_fingerprint: of the images kept for a test.
        shuffle_streams: of the order by blocks; 1 in earlier versions.
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
    class_weights: list[float] | None = None
    pixels: PixelKind = "uint8"
    train_content: str | None = None
    val_content: str | None = None
    train_names: str | None = None
    task_name: TaskName = "classification"
    loss: str | None = None
    known: list[float] | None = None
    target_mean: list[float] | None = None
    target_std: list[float] | None = None
    whole_images: bool = False
    mask_values: list[int] | None = None
    thresholds: list[float] | None = None
    shuffle_streams: int = 1
    test_samples: int = 0
    test_fingerprint: str | None = None

    @property
    def task(self) -> Task:
        return _TASKS[self.task_name](self)

    def choice(self, settings: Settings) -> TargetChoice:
        """Which targets of other data a model of these facts knows."""
        has_columns = KINDS[self.task_name].is_table and settings.label_separator is None
        choice = replace(target_choice(settings), of_others=True)
        if self.mask_values is not None:
            pairs = tuple(zip(self.mask_values, self.classes, strict=True))
            return replace(choice, columns=(), mask_classes=pairs)
        return replace(choice, columns=tuple(self.classes)) if has_columns else choice

    def as_json(self) -> bytes:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> "DataFacts":
        try:
            return cls(**dataset_facts(path))
        except (ValueError, TypeError) as error:
            is_newer = isinstance(error, TypeError)
            why = "it is of another version of flambeau" if is_newer else error
            raise InputError(
                f"{path} cannot be read: {why}; is {path.parent} a run of flambeau train?"
            ) from error


def _classification(facts: DataFacts) -> Classification:
    return Classification(tuple(facts.classes))


def _multilabel(facts: DataFacts) -> Multilabel:
    return Multilabel(
        tuple(facts.classes),
        thresholds=None if facts.thresholds is None else tuple(facts.thresholds),
        known=None if facts.known is None else tuple(facts.known),
        kind=facts.loss or Multilabel.losses[0],
        is_whole=facts.whole_images,
    )


def _regression(facts: DataFacts) -> Regression:
    return Regression(
        tuple(facts.classes),
        mean=tuple(facts.target_mean or ()),
        std=tuple(facts.target_std or ()),
        known=None if facts.known is None else tuple(facts.known),
        kind=facts.loss or Regression.losses[0],
        is_whole=facts.whole_images,
    )


def _segmentation(facts: DataFacts) -> Segmentation:
    return Segmentation(
        tuple(facts.classes),
        tuple(facts.mask_values or ()),
        known=facts.known[0] if facts.known else 1.0,
        kind=facts.loss or Segmentation.losses[0],
    )


_TASKS: dict[str, Callable[[DataFacts], Task]] = {
    "classification": _classification,
    "multilabel": _multilabel,
    "regression": _regression,
    "segmentation": _segmentation,
}


def with_thresholds(facts: DataFacts, folder: RunFolder) -> DataFacts:
    """The facts with a run's thresholds of several labels for its published weights."""
    result = published(folder)
    if result is None:
        return facts
    try:
        kept = json_file(folder.path / EVALUATION)
    except (OSError, ValueError):
        return facts
    thresholds = kept.get("thresholds") if isinstance(kept, dict) else None
    if not isinstance(thresholds, list) or kept.get("step") != result.step:
        return facts
    are_shares = all(isinstance(value, float) and 0 <= value <= 1 for value in thresholds)
    if not are_shares or len(thresholds) != len(facts.classes):
        return facts
    return replace(facts, thresholds=thresholds)


@dataclass(frozen=True)
class Prepared:
    """The settings and data of a training, before anything is built."""

    settings: ResolvedSettings
    facts: DataFacts
    train: Source
    val: Source

    def but(self, **changes: Any) -> "Prepared":
        return replace(self, settings=replace(self.settings, **changes))


def open_data(settings: Settings) -> tuple[Source, Source]:
    """The sources of a run, for training and for validation."""
    # The hold-out must not depend on the seed: a run from another run's weights would be evaluated on images
    # that those have learned.
    path = None if settings.data is None else Path(settings.data)
    return open_sources(
        path,
        seed=0,
        download=settings.download,
        choice=target_choice(settings),
        cache=cache_options(settings),
    )


def open_test(settings: Settings, facts: DataFacts) -> Source:
    """The images that `settings.test` keeps, with the run's classes.

    Raises:
        InputError: they cannot be opened, or are made by a function, which is not run for it.
    """
    assert settings.test is not None
    cache = cache_options(settings)
    if target_choice(settings).test is None:
        if is_function(settings.test):
            raise InputError(
                f"test = {settings.test!r} names code: give images, or a share such as 10%"
            )
        return open_source(
            Path(settings.test),
            facts.classes,
            download=settings.download,
            choice=facts.choice(settings),
            cache=cache,
        )
    choice = target_choice(settings)
    path = EMBEDDED if settings.data is None else Path(settings.data)
    train, _ = open_parts(path, download=settings.download, choice=choice, cache=cache)
    return part_to_test(train, choice)


def with_test(facts: DataFacts, settings: Settings, train: Source, val: Source) -> DataFacts:
    """The facts of a new run with those of its test images, if any.

    Raises:
        InputError: they cannot be opened, or are among those to train or validate on.
    """
    if settings.test is None:
        return facts
    test = open_test(settings, facts)
    is_same = test.fingerprint in (train.fingerprint, val.fingerprint)
    if is_same or settings.test == settings.data:
        raise InputError(
            f"test = {settings.test!r} is what is trained or validated on: name other images, or a share "
            "such as 10%, which is left out of these"
        )
    for source, purpose in ((train, "train"), (val, "validate")):
        _require_others(test, source, purpose)
    if target_choice(settings).test is None:
        require_apart(train, test, "test")
        require_apart(val, test, "test")
    return replace(facts, test_samples=len(test), test_fingerprint=test.fingerprint)


def check_test(facts: DataFacts, settings: Settings) -> Source:
    """The images to test on, unchanged since the run's start.

    Raises:
        InputError: they have changed, or cannot be opened.
    """
    test = open_test(settings, facts)
    if test.fingerprint != facts.test_fingerprint:
        raise InputError(
            f"the images of test = {settings.test!r} have changed since the run was started "
            f"({facts.test_samples} images then, {len(test)} now); restore them, or start again with another "
            "--out"
        )
    return test


def _require_others(test: Source, source: Source, purpose: str) -> None:
    """Refuse files that are to test on and to do something else with, too."""
    tested = {*files_of(test)}
    for file in files_of(source):
        if file is not None and file in tested:
            raise InputError(
                f"{file} is to {purpose} on and to test on: name other images with --test, or a share such "
                "as 10%, which is left out of the others"
            )


def files_of(source: Source) -> list[str | None]:
    """Where each image really lies; None without a file of its own."""
    real = functools.cache(os.path.realpath)
    files = (file_of(source, number) for number in range(len(source)))
    return [None if file is None else os.path.join(real(file.parent), file.name) for file in files]  # noqa: PTH118 - a million of them


def cache_options(settings: Settings) -> CacheOptions:
    """Where blocks of a store are kept: as a command says, else as the run."""
    chosen = chosen_cache()
    if chosen is not None:
        return chosen
    folder = None if settings.cache is None else Path(settings.cache)
    if settings.cache_size is None:
        return CacheOptions(folder)
    return CacheOptions(folder, parse_bytes(settings.cache_size, name="cache_size"))


def check_cache(settings: Settings, data: str | None) -> None:
    """Refuse settings of the cache for data that are not in a store."""
    given = settings.cache or settings.cache_size
    if given is not None and (data is None or not is_address(data)):
        name = "cache" if settings.cache is not None else "cache_size"
        raise InputError(
            f"{name} = {given!r} is for data in a store (s3://..., https://...), and has no effect with "
            f"{data or 'the embedded data'}: leave it out"
        )


def target_choice(settings: Settings) -> TargetChoice:
    """Which targets of the data the settings name."""
    columns = () if settings.target is None else tuple(split_names(settings.target))
    return TargetChoice(
        cast(Any, settings.task),
        columns,
        settings.label_separator,
        group=settings.group,
        split=settings.split,
        fold=None if settings.fold is None else parse_fold(settings.fold),
        subset=settings.subset,
        test=None if settings.test is None else parse_test(settings.test),
        ignore_index=settings.ignore_index,
    )


def reopen_data(settings: ResolvedSettings, facts_path: Path, permission: Permission) -> Prepared:
    """The settings and data of an existing run, which must be unchanged, like the model's file.

    UntrustedCode: data or model are of a function in a file that may not be run.
    """
    facts = DataFacts.read(facts_path)
    permission.ask_for(vars(settings), "model", "data")
    check_teacher_code(settings.teacher, trust=permission.trust, say=permission.say)
    train, val = (of_kind(source, facts.pixels, facts.channels) for source in open_data(settings))
    check_unchanged(facts, train, val, settings=settings)
    return Prepared(settings, facts, train, val)


def check_unchanged(
    facts: DataFacts,
    train: Source,
    val: Source,
    *,
    settings: ResolvedSettings,
    moved: str | None = None,
) -> None:
    """Refuse to continue a run on other data; `moved`: where they were and are."""
    for what, source, samples, fingerprint, content in (
        ("training", train, facts.train_samples, facts.train_fingerprint, facts.train_content),
        ("validation", val, facts.val_samples, facts.val_fingerprint, facts.val_content),
    ):
        # At the same path only the fingerprint counts: the content of an image may have been repaired.
        is_same = source.fingerprint == fingerprint
        if not is_same or (moved and content not in (None, content_sample(source))):
            images = f"({samples} images then, {len(source)} now)"
            if samples == len(source):
                images = f"({samples} images as then, with other names, sizes or labels)"
            if is_same:
                images = "(of the same names and sizes, and of another content)"
            raise DataChanged(
                f"{moved}: its {what} data are others {images}; name another folder with --out"
                if moved
                else f"the {what} data have changed since the run was started {images}; restore them, "
                "start again with --fresh or another --out, or let a run on the new data begin with what "
                "this one has learned: --weights RUN --out NEW"
            )
    check_model_file(facts, settings.model)
    if class_weights(settings, train) != facts.class_weights:
        raise DataChanged(
            f"the weights in {settings.class_weights} have changed since the run was started; restore them, "
            "or start again with --fresh or another --out"
        )


def check_model_file(facts: DataFacts, model: str) -> None:
    """Raise DataChanged if the file of the model has changed; it is read, but not run."""
    if model_file_sha256(model) != facts.model_file_sha256:
        raise DataChanged(
            f"{model.rpartition(':')[0]} has changed since the run was started; "
            "restore it, or start again with --fresh or another --out"
        )


def moves_only(facts: DataFacts) -> bool:
    """Whether random operations only move pixels, of which white, or a color, is unknown."""
    return facts.pixels in ("unit", "float") or facts.channels not in COLORS


def datasets(
    prepared: Prepared,
) -> tuple[ImageDataset | DeviceDataset, ImageDataset | DeviceDataset]:
    """The two data sets of a run, held on its device where that pays."""
    settings = prepared.settings
    facts = prepared.facts
    train = prepared.train
    val = prepared.val
    require_unit(val, pixel_kind(train), "the training images")
    augmentation = Augmentation(settings.augment, settings.color_jitter, moves_only(facts))
    device = pick_device(settings.device)
    holds = device.type in _HOLDING and not settings.workers  # workers would not be used

    scale = settings.crop_scale or CROP_SCALE[0], CROP_SCALE[1]
    flip: bool | Literal["alternate"] = "alternate" if settings.alternate_flip else settings.flip
    resize = facts.task.eval_resize
    crop = TrainingCrop(flip, scale, settings.padding, settings.crop, resize)

    def make(source: Source, *, train: bool) -> ImageDataset | DeviceDataset:
        skip_bad = settings.skip_bad_images > 0
        size = settings.image_size if train else settings.eval_size or settings.image_size
        shape: dict[str, Any] = {"image_size": size, "channels": facts.channels}
        common = {**shape, "train": train, "skip_bad": skip_bad, "crop": crop}
        if holds and not (train and augmentation) and can_hold(source, **shape):
            return DeviceDataset(source, device=device, **common)
        return ImageDataset(source, augmentation=augmentation, **common)

    return make(train, train=True), make(val, train=False)


def noise_batch(data: ImageDataset | DeviceDataset, size: int, device: torch.device) -> Tensor:
    """Random images (size, C, S, S) uint8.

    In channels_last: a model is compiled again for other strides.
    """
    shape = (size, data.image_size, data.image_size, data.channels)
    return torch.randint(256, shape, dtype=torch.uint8).to(device).permute(0, 3, 1, 2)


def noise_targets(data: ImageDataset | DeviceDataset, size: int, device: torch.device) -> Tensor:
    """Targets for `noise_batch`, of the shape and dtype of those of a data set: all 0."""
    if getattr(data, "has_masks", False):
        shape: tuple[int, ...] = (size, data.image_size, data.image_size)
        return torch.zeros(shape, dtype=torch.uint8, device=device)
    labels = data.source.labels
    return torch.zeros(size, *labels.shape[1:], dtype=labels.dtype, device=device)


def check_teacher_code(teacher: str | None, *, trust: bool, say: Callable[[str], object]) -> None:
    """Ask for permission to run the models' files of code that teachers' folders name."""
    for run in teacher_runs(teacher):
        folder = RunFolder(run_here(run))
        stored = (folder.read_config() or {}) if folder.path.is_dir() else {}  # refused later
        folder.permission(stored, trust=trust, say=say).ask_for(stored, "model", "builder")


def teacher_sha256(teacher: str | None) -> str | None:
    """Of the weights of the teacher; of several, of these in their order. None without one."""
    digests = []
    for run in teacher_runs(teacher):
        folder = RunFolder(run_here(run))
        if not folder.path.is_dir() or folder.read_config() is None or published(folder) is None:
            raise InputError(f"teacher = {run!r} is not the folder of a finished run")
        try:
            digests.append(hashlib.sha256(read_file(folder.weights)).hexdigest())
        except OSError as error:
            raise unreadable(folder.weights, error) from error
    if len(digests) < 2:
        return digests[0] if digests else None
    return hashlib.sha256("".join(digests).encode()).hexdigest()
