"""Which of the images that a model is evaluated on are those that it was trained on."""

import contextlib
import dataclasses
import os
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from flambeau.data.sources.data_names import is_named
from flambeau.data.sources.folds import part_to_test, split, subset_of, without_test
from flambeau.data.sources.open_data import EMBEDDED, open_sources
from flambeau.data.sources.source import (
    Source,
    SubsetSource,
    content_sample,
    names_digest,
)
from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.trainer.parts.data import files_of, open_test, target_choice
from flambeau.trainer.prediction.trained_model import Trained
from flambeau.user_code import is_function

_Part = Literal["train", "test"]
_COMPARED = 16  # images of which all bytes are compared, where the data were packed meanwhile


def trained_images(trained: Trained, data: Path, source: Source) -> Tensor:
    """Which images of a source the model was trained on.

    They are recognized where the source is all that the run has split, wherever it lies now, where its files
    are in the folder or listing that the run names, and where it is the run's packed file. Of changed data
    those count that the same rule takes for training: an image more or less moves one other at most.

    Args:
        data: what was opened as `source`, with the model's classes.

    Returns:
        (N,) bool.
    """
    return _recognized(trained, data, source, "train")


def images_to_test(trained: Trained, data: Path, source: Source) -> Tensor:
    """Which images of a source the run keeps for a test, recognized as those of `trained_images`."""
    if trained.settings.test is None:
        return torch.zeros(len(source), dtype=torch.bool)
    return _recognized(trained, data, source, "test")


def _recognized(trained: Trained, data: Path, source: Source, part: _Part) -> Tensor:
    names: Iterable[Hashable] = source.names
    seen = _names_of(trained, source, part)
    for facts in trained.others:
        seen |= _names_of(dataclasses.replace(trained, facts=facts), source, part)
    if not seen and _overlaps(_recorded(trained, part), data):
        train = _recorded_data(trained, part)
        names = files_of(source)
        seen = (
            {file for file in files_of(train) if file is not None} if train is not None else set()
        )
        if not seen and train is not None:  # packed: its images have names alone
            names = source.names
            seen = _names_there(train, source)
    if not seen:
        return torch.zeros(len(source), dtype=torch.bool)
    return torch.tensor([name in seen for name in names])


def _names_of(trained: Trained, source: Source, part: _Part) -> set[Hashable]:
    """Names of the images of a part in a source that is what the run has split; none if it is not."""
    facts = trained.facts
    choice = target_choice(trained.settings)
    tested = 0 if choice.test is None else facts.test_samples
    if part == "test" and not tested:
        return set()
    if choice.subset is None and len(source) != facts.train_samples + facts.val_samples + tested:
        return set()
    try:
        here = subset_of(split(without_test(source, choice), choice)[0], choice)
    except InputError:  # it cannot have been split
        return set()
    has_content = facts.train_content in (None, content_sample(here))
    is_same = here.fingerprint == facts.train_fingerprint and has_content
    if not is_same and names_digest(here) == facts.train_names:  # packed since then, or unpacked
        train = _recorded_data(trained, "train")
        is_same = train is not None and _begin_alike(train, here)
    if not is_same:
        return set()
    return {*(here if part == "train" else part_to_test(source, choice)).names}


def _recorded_data(trained: Trained, part: _Part) -> Source | None:
    """A part of the data that the run names, if they are files of this disk and still there."""
    recorded = _recorded(trained, part)
    if recorded is None or is_named(Path(recorded)) or is_function(recorded):
        return None
    with contextlib.suppress(InputError, OSError):
        if part == "test":
            return open_test(trained.settings, trained.facts)
        return open_sources(Path(recorded), choice=target_choice(trained.settings))[0]
    return None


def _recorded(trained: Trained, part: _Part) -> str | None:
    """The data that the run names; None if it is not known."""
    settings = trained.settings
    if part == "test" and settings.test is not None and target_choice(settings).test is None:
        return settings.test
    if trained.settings.data is None and trained.knows_its_data:
        return str(EMBEDDED)
    return trained.settings.data


def _names_there(train: Source, source: Source) -> set[Hashable]:
    """Names of the training images, if all are in a source, and some of them as the same bytes or pixels."""
    place = {name: index for index, name in enumerate(source.names)}
    if len(place) < len(source) or any(name not in place for name in train.names):
        return set()
    beside = SubsetSource(source, torch.tensor([place[name] for name in train.names]))
    return {*train.names} if _begin_alike(train, beside) else set()


def _begin_alike(one: Source, other: Source) -> bool:
    """Whether some images, evenly spaced, are stored as the same bytes or pixels."""
    count = min(len(one), len(other))
    numbers = range(0, count, max(1, count // _COMPARED))
    try:
        pairs = ((one.read(number), other.read(number)) for number in numbers)
        return all(a == b if isinstance(a, bytes) else np.array_equal(a, b) for a, b in pairs)
    except OSError:
        return False


def _overlaps(recorded: str | None, data: Path) -> bool:
    """Whether both are files or folders of this disk, one of them in the other."""
    if recorded is None:
        return False
    paths = (Path(recorded), data)
    if any(is_address(path) or is_named(path) or is_function(path) for path in paths):
        return False
    # Not Path.is_dir, which raises for a folder without permission: a run of somebody else may name one.
    folders = [
        os.path.realpath(path if os.path.isdir(path) else path.parent)  # noqa: PTH112
        for path in paths
    ]
    return os.path.commonpath(folders) in folders
