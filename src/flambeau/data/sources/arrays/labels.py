"""Labels and class names that are stored as arrays."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from flambeau.data.sources.arrays.npy_pth import Rows
from flambeau.data.sources.class_names_file import chosen_labels, classes_file, named_labels
from flambeau.errors import InputError

_AT_ONCE = 1 << 22  # numbers of one-hot rows


def read_labels(rows: Rows, what: str) -> list[int] | list[str]:
    """All labels of an array: (N,) or (N, 1) whole numbers of any type or words; or (N, classes) one-hot."""
    if len(rows.shape) == 2 and rows.shape[1] > 1 and rows.dtype.kind in "iufb":
        return _of_one_hot(rows, what)
    if len(rows.shape) > 1 and max(rows.shape[1:]) > 1:
        raise InputError(
            f"{what} has shape {rows.shape}; expected one number, word or one-hot row per image"
        )
    labels = rows.read(0, rows.shape[0]).reshape(-1) if rows.shape else np.empty(0, object)
    if labels.dtype.kind in "SUO":
        return _words(labels.tolist(), what)
    if labels.dtype.kind == "f":
        wrong = (labels != np.trunc(labels)).nonzero()[0]  # NaN too
        if len(wrong):
            raise InputError(
                f"{what}[{wrong[0]}] is {labels[wrong[0]]}\nA label is the number of a class: 0, 1, 2, ..."
            )
    elif labels.dtype.kind not in "iub":
        raise InputError(f"{what} is {labels.dtype}; expected numbers or words")
    if labels.dtype.kind in "fu" and labels.size and labels.max() > np.iinfo(np.int64).max:
        raise InputError(
            f"{what} has {labels.max()}\nA label is the number of a class: 0, 1, 2, ..."
        )
    return [int(label) for label in labels.tolist()]


def _of_one_hot(rows: Rows, what: str) -> list[int]:
    count, width = rows.shape
    step = max(1, _AT_ONCE // width)
    labels: list[int] = []
    for start in range(0, count, step):
        vectors = rows.read(start, min(start + step, count))
        wrong = ((vectors != 0).sum(1) != 1) | ((vectors == 1).sum(1) != 1)
        if wrong.any():
            at = int(wrong.argmax())
            raise InputError(
                f"{what}[{start + at}] is no one-hot row: {vectors[at].tolist()!s:.60}\n"
                "A row has a single 1, in the place of the image's class, and zeros"
            )
        labels += vectors.argmax(1).tolist()
    return labels


def classes_and_labels(
    path: Path, labels: list[int] | list[str], names: Rows | None, describe: Callable[[int], str]
) -> tuple[tuple[str, ...], Tensor]:
    """Class names, and the labels as positions in them.

    Args:
        names: the class names in the file, if it has any. A classes file beside it has priority: users can
            write it to correct them.
    """
    if names is None or len(names.shape) != 1 or classes_file(path).exists():
        return named_labels(labels, path, describe)
    classes = tuple(_words(names.read(0, names.shape[0]).tolist(), f"{path}: the class names"))
    return chosen_labels(labels, classes, str(path), describe)


def _words(values: list[object], what: str) -> list[str]:
    words = []
    for value in values:
        try:
            word = value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            raise InputError(f"{what}: {value!r} is not UTF-8 text") from error
        if not isinstance(word, str):
            raise InputError(f"{what}: {value!r:.60} is no text")
        words.append(word)
    return words
