"""Which of the images that a model is evaluated on are those that it was trained on."""

import functools
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from flambeau.data.sources.data_names import is_named
from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.source import Source, file_of, hold_out, names_digest
from flambeau.errors import InputError
from flambeau.trainer.prediction.trained_model import Trained
from flambeau.user_code import is_function


def trained_images(trained: Trained, data: Path, source: Source) -> Tensor:
    """Which images of a source the model was trained on.

    They are recognized where the source is all that the run has split into two parts, wherever it lies now,
    and where its files are in the folder or the listing that the run names. Of data that have changed since
    then those count that the same rule takes for training: an image more or less moves one other at most.

    Args:
        data: what was opened as `source`, with the classes of the model.

    Returns:
        (N,) bool.
    """
    facts = trained.facts
    names: Iterable[object] = ()
    seen: set[object] = set()
    if len(source) == facts.train_samples + facts.val_samples:
        try:
            train, _ = hold_out(source)
        except InputError:  # nothing can be held out of it: it was not split
            pass
        else:
            is_same = train.fingerprint == facts.train_fingerprint
            if (
                is_same or names_digest(train) == facts.train_names
            ):  # packed since then, or unpacked
                names = source.names
                seen.update(train.names)
    if not seen and _overlaps(trained.settings.data, data):
        try:
            train, _ = open_sources(Path(str(trained.settings.data)))
        except InputError:  # it has changed beyond recognition
            pass
        else:
            names = _files(source)
            seen.update(file for file in _files(train) if file is not None)
    if not seen:
        return torch.zeros(len(source), dtype=torch.bool)
    return torch.tensor([name in seen for name in names])


def _overlaps(recorded: str | None, data: Path) -> bool:
    """Whether both are files or folders of this disk, one of them in the other."""
    if recorded is None:
        return False
    paths = (Path(recorded), data)
    if any(is_named(path) or is_function(path) for path in paths):
        return False
    folders = [os.path.realpath(path if path.is_dir() else path.parent) for path in paths]
    return os.path.commonpath(folders) in folders


def _files(source: Source) -> list[str | None]:
    """Where each image really lies; None without a file of its own."""
    real = functools.cache(os.path.realpath)
    files = (file_of(source, number) for number in range(len(source)))
    return [None if file is None else os.path.join(real(file.parent), file.name) for file in files]  # noqa: PTH118 - a million of them
