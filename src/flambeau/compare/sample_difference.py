"""The first sample in which the data of two runs differ: a missing one, its label, or its pixels."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.compare.recorded_facts import RecordedFacts
from flambeau.data.sources.fold_name import parse_fold, parse_test
from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.source import Source, mask_of
from flambeau.data.sources.targets import TargetChoice, target_texts, task_of
from flambeau.errors import DecodeError, InputError
from flambeau.images.all_channels import all_channels, stored_channels
from flambeau.images.decode import Picture, Stored
from flambeau.recipes.data.sample_order import sample_order
from flambeau.trainer.settings.settings import split_names
from flambeau.user_code import is_function

READING_S = 20.0
"""Time for reading the images of both runs; chosen: enough for 100,000 small files or 5,000 photos."""
_MAX = 1000  # differing samples that are counted


@dataclass(frozen=True)
class SampleDifference:
    """How two data sets differ.

    Attributes:
        num_samples: how many differ, at least.
        step: in which both runs, with equal settings, first use one, if known.
    """

    text: str
    num_samples: int
    step: int | None = None


def open_training_data(run: RecordedFacts) -> Source:
    """The training images of a run; InputError: changed, or made by a function."""
    data = run.settings.get("data")
    if is_function(data):
        raise InputError(f"{data} would have to be run to open it")
    try:
        train, _ = open_sources(
            data if data is None else Path(data), seed=0, choice=_choice(run.settings)
        )
    except (OSError, TypeError, ValueError) as error:
        raise InputError(str(error).splitlines()[0]) from error
    if train.fingerprint != run.data.get("train_fingerprint"):
        where = "the embedded data" if data is None else data
        raise InputError(f"{where} has changed since {run.folder.path} was trained on it")
    return train


def _choice(settings: Mapping[str, Any]) -> TargetChoice:
    target = settings.get("target")
    columns = tuple(split_names(str(target))) if target else ()
    return TargetChoice(
        settings.get("task"),
        columns,
        settings.get("label_separator"),
        group=settings.get("group"),
        split=settings.get("split"),
        subset=settings.get("subset"),
        fold=parse_fold(str(fold)) if (fold := settings.get("fold")) is not None else None,
        test=parse_test(str(test)) if (test := settings.get("test")) is not None else None,
        ignore_index=settings.get("ignore_index"),
    )


def sample_difference(
    left: Source, right: Source, *, batch: int = 0, seed: int = 0
) -> SampleDifference | None:
    """The first difference between two sources; None if none was seen in the time.

    `batch`: samples per step of both; 0 if (seed, epoch) do not give their order.
    """
    if left.classes != right.classes:
        odd = [name for name in left.classes if name not in right.classes]
        odd += [name for name in right.classes if name not in left.classes]
        what = f"only one has class {odd[0]!r}" if odd else "the order of the classes"
        return SampleDifference(f"the classes differ: {what}", 0)
    if list(left.names) != list(right.names):
        return _name_difference(left, right)
    if task_of(left) != task_of(right):
        return SampleDifference(f"the task: {task_of(left)} and {task_of(right)}", 0)
    pairs = [*zip(target_texts(left), target_texts(right), strict=True)]
    numbers = [number for number, (one, other) in enumerate(pairs) if one != other]
    texts = {
        number: f"the label of {left.describe(number)}: {' and '.join(pairs[number])}"
        for number in numbers[:_MAX]
    }
    deadline = time.monotonic() + READING_S
    for number in range(len(left)):
        if time.monotonic() > deadline or len(texts) >= _MAX:
            break
        text = _content_difference(left, right, number) or _mask_difference(left, right, number)
        if number not in texts and text:
            texts[number] = text
    if not texts:
        return None
    first = min(texts)
    step = None
    if batch:
        order = sample_order(len(left), seed=seed, epoch=0).tolist()
        positions = {number: position for position, number in enumerate(order)}
        first = min(texts, key=lambda number: positions[number])
        step = positions[first] // batch + 1
    return SampleDifference(texts[first], max(len(texts), len(numbers)), step)


def _mask_difference(left: Source, right: Source, number: int) -> str | None:
    """How the masks of an image differ; None for data without masks, and for bad ones."""
    try:
        one, other = (mask_of(source, number) for source in (left, right))
    except DecodeError:
        return None
    if one is None or other is None or (one.shape == other.shape and (one == other).all()):
        return None
    return f"the mask of {left.describe(number)}"


def _name_difference(left: Source, right: Source) -> SampleDifference:
    sides: list[Sequence[str]] = [list(source.names) for source in (left, right)]
    others = [set(names) for names in sides]
    alone = [[k for k, name in enumerate(sides[n]) if name not in others[1 - n]] for n in (0, 1)]
    if not alone[0] and not alone[1]:
        return SampleDifference("the same samples in another order", len(left))
    texts = [
        f"{source.describe(numbers[0])} is in the {which} alone"
        for source, numbers, which in zip((left, right), alone, ("first", "second"), strict=True)
        if numbers
    ]
    counts = f"{len(left)} samples and {len(right)}"
    return SampleDifference(f"{'; '.join(texts)} ({counts})", len(alone[0]) + len(alone[1]))


def _content_difference(left: Source, right: Source, number: int) -> str | None:
    """How two images differ, in words; None if they are equal."""
    try:
        images = left.read(number), right.read(number)
    except OSError as error:
        return f"{error.filename or left.describe(number)} cannot be read"
    if _are_equal(*images):
        return None
    name = left.describe(number)
    try:
        pixels = [_pixels(image) for image in images]
    except DecodeError as error:
        return f"{name}: one of the two cannot be decoded ({error})"
    if pixels[0].shape[2] != pixels[1].shape[2]:
        return f"the channels of {name}: {pixels[0].shape[2]} and {pixels[1].shape[2]}"
    if pixels[0].shape != pixels[1].shape:
        sizes = [f"{image.shape[1]} x {image.shape[0]}" for image in pixels]
        return f"the size of {name}: {sizes[0]} and {sizes[1]} pixels"
    positions = np.argwhere((pixels[0] != pixels[1]).any(axis=2))
    if not len(positions):
        return f"the file {name}, whose pixels are the same"
    row, column = positions[0]
    values = [image[row, column] for image in pixels]
    shown = [f"{v[0]:g}" if (v == v[0]).all() else "/".join(f"{c:g}" for c in v) for v in values]
    count = f"{len(positions)} pixel{'s' * (len(positions) != 1)}"
    return f"{count} of {name}, first in row {row}, column {column}: {shown[0]} and {shown[1]}"


def _pixels(image: Stored) -> NDArray[np.float64]:
    """(H, W, 3), or all channels of an image where these are no color."""
    found = stored_channels(image)
    if found.are_no_color:
        return all_channels(image, found.channels).astype(np.float64)
    return Picture(image).pixels(channels=3).astype(np.float64)


def _are_equal(left: Stored, right: Stored) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        same = left.dtype == right.dtype and left.shape == right.shape
        return same and left.tobytes() == right.tobytes()
    return type(left) is type(right) and bool(left == right)
