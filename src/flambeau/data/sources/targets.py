"""What is learned of each image: its class, several labels, numbers, or the class of each pixel.

N: images, K: labels, columns of numbers, or classes of pixels.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flambeau.data.sources.target_kinds import KINDS, TargetKind
from flambeau.data.sources.target_names import TaskName
from flambeau.errors import InputError, nearest

_SEPARATORS = ("|", ";", ",", " ")  # of a cell, if the user names none: the first that occurs
_SURE = ("|", ";")  # what no name of a class holds
_MISSING = ("", "nan", "na", "n/a", "null", "none")  # in lower case, in a column of numbers
_BITS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "": math.nan}
_MOST_CELLS = 1 << 30  # of a table of labels: 4 GiB
_NEARLY_ALL = 0.75  # of the cells of a column are numbers: the others are mistakes; chosen
_COARSE = 1e-3  # of a standard deviation: what rounding to float32 may change; chosen


@dataclass(frozen=True)
class TargetChoice:
    """The targets of a training, as far as the user says.

    Attributes:
        task: None: found from the data.
        group: column that says which images stay together, such as a patient's.
        split: column of train, val or test; None: one of a usual name.
        fold: part of the training images to hold out, from 1, and of how many; None: see `hold_out`.
        subset: share of the training images to train on; None: all.
        test: share of the training images kept for a test, before any other split.
        ignore_index: number in masks that does not count; None: 255, unless it has a name.
        mask_classes: number and name of each class in masks, if no file says them; none: found.
        of_others: the data are others than those of this choice: missing columns are left out, but not the
            targets of a table.
    """

    task: TaskName | None = None
    columns: tuple[str, ...] = ()
    separator: str | None = None
    group: str | None = None
    split: str | None = None
    fold: tuple[int, int] | None = None
    subset: float | None = None
    test: float | None = None
    ignore_index: int | None = None
    mask_classes: tuple[tuple[int, str], ...] = ()
    of_others: bool = False
    is_learned: bool = False

    @property
    def is_wish(self) -> bool:
        """Whether the columns are those that the user names for these data."""
        return not (self.of_others or self.is_learned)

    @property
    def flag(self) -> str | None:
        """The first flag that names something of a table; None if there is none."""
        flags = {
            "--target": self.columns,
            "--label-separator": self.separator,
            "--group": self.group,
            "--split": self.split,
        }
        return next((flag for flag, given in flags.items() if given), None)


FOUND = TargetChoice()
"""Everything is found from the data."""


class Targets(NamedTuple):
    """The targets of all images.

    Attributes:
        labels: (N, K) float32: 1, 0, or NaN for unknown; or numbers, NaN where one is missing.
        separator: between the labels of a cell; None: each label has a column of its own.
    """

    task: TaskName
    names: tuple[str, ...]
    labels: Tensor
    separator: str | None = None


def task_of(source: Any) -> TaskName:
    """The task that a source's targets are for; 'classification' if it does not say."""
    task: TaskName = getattr(source, "task", "classification")
    return task


def separator_of(source: Any) -> str | None:
    """What separates the labels of a cell of its table; None: no cell has several."""
    separator: str | None = getattr(source, "separator", None)
    return separator


def groups_of(source: Any) -> Sequence[str] | None:
    """The group of each image, which a split keeps together; None without groups."""
    groups: Sequence[str] | None = getattr(source, "groups", None)
    return groups


def kind_of_targets(source: Any) -> TargetKind:
    """What is done with the targets of a source."""
    return KINDS[task_of(source)]


def target_texts(source: Any) -> list[str]:
    """The targets of each image as text: its class, its labels ('?name' unknown), or its numbers."""
    return kind_of_targets(source).texts(source.classes, source.labels)


def renumbered(source: Any, labels: Tensor, classes: tuple[str, ...]) -> Tensor:
    """Targets of a source for other names, or another order of them.

    An unknown label is 0 where cells name what is there, and NaN where it has no column. ValueError: an image
    of a class, or with a label, that is not in `classes`.
    """
    unknown = lost_name(source, labels, classes)
    if unknown is not None:
        raise ValueError(f"{unknown!r} is not in classes")
    number = {name: position for position, name in enumerate(classes)}
    positions = torch.tensor([number.get(name, -1) for name in source.classes])
    absent = math.nan if separator_of(source) is None else 0.0
    return kind_of_targets(source).renumbered(labels, positions, len(classes), absent)


def lost_name(source: Any, labels: Tensor, classes: Sequence[str]) -> str | None:
    """An image's class or label, or a column of numbers, outside of `classes`, if any."""
    known = {*classes}
    kind = kind_of_targets(source)
    for at, name in enumerate(source.classes):
        if name not in known and kind.has(labels, at).any():
            return str(name)
    return None


def as_learned(train: Any, choice: TargetChoice) -> TargetChoice:
    """The targets to validate on that are learned, where these are no classes."""
    kind = kind_of_targets(train)
    if not kind.is_table:
        return choice
    values: tuple[int, ...] = getattr(train, "mask_values", ())
    if values:
        pairs = tuple(zip(values, train.classes, strict=True))
        return replace(choice, task=task_of(train), mask_classes=pairs)
    separator = separator_of(train)
    columns = choice.columns if separator is not None else tuple(train.classes)
    return replace(
        choice, task=task_of(train), columns=columns, separator=separator, is_learned=True
    )


def require_classes(path: Path, choice: TargetChoice) -> None:
    """InputError if other targets are wanted of data with one class per image."""
    if choice.task not in (None, "classification"):
        place = (
            "Masks lie in a folder beside that of the images, images/ and masks/"
            if choice.task == "segmentation"
            else "Several labels per image, and numbers, stand in the columns of a table (.csv, .tsv, "
            ".parquet, .arrow, hf:NAME), or in the records of a .rec, .tfrecord or .tar"
        )
        raise InputError(
            f"{path} holds one class per image, and nothing for {choice.task}\n{place}"
        )
    refuse_columns(path, choice)


def refuse_columns(path: Path, choice: TargetChoice) -> None:
    """InputError if the user names something of a table or of masks, for data without them."""
    if choice.ignore_index is not None and choice.is_wish:
        raise InputError(f"{path} has no masks, so --ignore-index has no effect: leave it out")
    if choice.flag is not None and choice.is_wish:
        raise InputError(f"{path} has no columns, so {choice.flag} has no effect: leave it out")


# ---------------------------------------------------------------- cells of a table


def named_column(wanted: str, columns: Sequence[str], whose: str) -> int:
    """The position of the column named so; `whose` begins the message, such as 'FILE has'."""
    matches = [at for at, name in enumerate(columns) if name == wanted]
    matches = matches or [at for at, name in enumerate(columns) if name.lower() == wanted.lower()]
    if len(matches) != 1:
        problem = "two columns" if matches else "no column"
        raise InputError(
            f"{whose} {problem} {wanted!r}{nearest(wanted, columns)}\n"
            f"Its columns are {', '.join(columns)}"
        )
    return matches[0]


def table_targets(
    columns: Sequence[Sequence[str]],
    names: Sequence[str],
    choice: TargetChoice,
    cell: Callable[[int, int], str],
    known: Sequence[str] | None = None,
) -> Targets | None:
    """The targets in the cells of columns; None if they are classes.

    `cell` describes a row and a column in errors; `known` are the names of classes or labels in order, if a
    file says them. InputError: cells that do not fit the task, or are ambiguous.
    """
    task = choice.task
    if len(columns) > 1:
        if task is None:
            task = "multilabel" if all(map(is_indicator, columns)) else "regression"
        if task == "classification":
            raise InputError(
                f"{', '.join(names[:5])}: a class stands in one column\n"
                "Name that column, or give --task multilabel for a column per label"
            )
        if task == "multilabel":
            return _indicators(columns, names, cell)
        return _numbers(columns, names, cell)
    [cells] = columns
    if task is None and not {*cells} <= {*(known or ())}:
        if _names_several(cells):
            task = "multilabel"
        elif _has_fractions(cells):
            task = "regression"
        else:
            _refuse_text_among_numbers(cells, cell)
    if task == "regression":
        return _numbers(columns, names, cell)
    if task != "multilabel":
        return None
    if choice.separator is None and choice.columns and is_indicator(cells):
        return _indicators(columns, names, cell)
    return _cell_labels(cells, choice.separator, lambda row: cell(row, 0), known)


def is_indicator(cells: Sequence[str]) -> bool:
    """Whether the cells are 0, 1 or empty, with at least one that is not empty."""
    return any(cells) and all(text in _BITS for text in cells)


def _has_fractions(cells: Sequence[str]) -> bool:
    """Whether the cells are numbers, and not all whole ones, which may be those of classes."""
    numbers = [_number(text) for text in cells if text.lower() not in _MISSING]
    whole = all(value is not None and value.is_integer() for value in numbers)
    return bool(numbers) and None not in numbers and not whole


def _refuse_text_among_numbers(cells: Sequence[str], cell: Callable[[int, int], str]) -> None:
    """InputError for a text in a column that is one of numbers: most have a fraction, or nearly all are some.

    Otherwise each number would silently be a class of its own.
    """
    numbers = [_number(text) for text in cells if text.lower() not in _MISSING]
    known = [value for value in numbers if value is not None]
    fractions = sum(not value.is_integer() for value in known)
    nearly_all = fractions > 0 and len(known) >= _NEARLY_ALL * len(numbers)
    if 2 * fractions <= len(numbers) and not nearly_all:
        return
    row = next(
        row
        for row, text in enumerate(cells)
        if text.lower() not in _MISSING and _number(text) is None
    )
    raise InputError(
        f"{cell(row, 0)}: {cells[row]!r:.50} is no number, as most cells of its column are\n"
        f"{_remedy(cells[row])}; if they are names of classes, give --task classification"
    )


def _remedy(text: str) -> str:
    comma = re.fullmatch(r"[+-]?\d+,\d+", text)
    return f"Write {text.replace(',', '.')}" if comma else "Leave a missing one empty"


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and "_" not in text else None


def _names_several(cells: Sequence[str]) -> bool:
    """Whether cells hold several labels beyond doubt: separated by | or ;, and named in other rows, too."""
    for separator in _SURE:
        rows = [_parts(text, separator) for text in cells if text]
        several = [parts for parts in rows if len(parts) > 1]
        if several:
            counts = Counter(name for parts in rows for name in set(parts))
            return any(counts[name] > 1 for parts in several for name in parts)
    return False


def _parts(text: str, separator: str) -> list[str]:
    """The labels of a cell, without the brackets and quotes of a list."""
    if text.startswith("[") and text.endswith("]"):
        text, separator = text[1:-1], ","
    pieces = text.split() if separator == " " else text.split(separator)
    return [name for piece in pieces if (name := piece.strip().strip("'\"").strip())]


def _cell_labels(
    cells: Sequence[str],
    separator: str | None,
    cell: Callable[[int], str],
    known: Sequence[str] | None,
) -> Targets:
    if separator is None:
        used = (mark for mark in _SEPARATORS if any(mark in text for text in cells))
        separator = next(used, _SEPARATORS[0])
    rows = [_parts(text, separator) for text in cells]
    counts = Counter(name for parts in rows for name in parts)
    if not counts:
        raise InputError(f"{cell(0)}: no image has a label")
    by_number = all(name.isdecimal() for name in counts)
    names = [*known] if known is not None else sorted(counts, key=int if by_number else str)
    if len(rows) * len(names) > _MOST_CELLS:
        raise InputError(
            f"{cell(0)}: {len(names)} labels for {len(rows)} images, separated by {separator!r}\n"
            "If these are no labels, name what separates them: --label-separator"
        )
    for row, parts in enumerate(rows):
        twice = next((name for name in parts if parts.count(name) > 1), None)
        if twice is not None:
            raise InputError(f"{cell(row)}: label {twice!r} stands there twice\nName it once")
    number = {name: position for position, name in enumerate(names)}
    lost = next((name for name in counts if name not in number), None)
    if lost is not None:
        row = next(row for row, parts in enumerate(rows) if lost in parts)
        raise InputError(
            f"{cell(row)}: label {lost!r} is none of the {len(names)} in the file of class names\n"
            "Correct one of the two"
        )
    labels = torch.zeros(len(rows), len(names))
    at = [(row, number[name]) for row, parts in enumerate(rows) for name in parts]
    labels[tuple(torch.tensor(at).T)] = 1.0
    return Targets("multilabel", tuple(names), labels, separator)


def _indicators(
    columns: Sequence[Sequence[str]], names: Sequence[str], cell: Callable[[int, int], str]
) -> Targets:
    labels = torch.empty(len(columns[0]), len(columns))
    for at, cells in enumerate(columns):
        values = [_BITS.get(text) for text in cells]
        if None in values:
            row = values.index(None)
            raise InputError(
                f"{cell(row, at)}: {cells[row]!r:.50} is neither 0 nor 1, nor empty for unknown\n"
                "A column per label says 1 where an image has it"
            )
        labels[:, at] = torch.tensor(values)
    return Targets("multilabel", tuple(names), labels)


def _numbers(
    columns: Sequence[Sequence[str]], names: Sequence[str], cell: Callable[[int, int], str]
) -> Targets:
    labels = torch.empty(len(columns[0]), len(columns))
    for at, cells in enumerate(columns):
        values = list[float]()
        for row, text in enumerate(cells):
            value = math.nan if text.lower() in _MISSING else _number(text)
            if value is None:
                raise InputError(f"{cell(row, at)}: {text!r:.50} is no number\n{_remedy(text)}")
            values.append(value)
        labels[:, at] = number_column(values, f"{cell(0, at)}: column {names[at]!r}")
    return Targets("regression", tuple(names), labels)


def number_column(values: Sequence[float], what: str) -> Tensor:
    """Numbers as (N,) float32, NaN where one is missing.

    InputError: all are missing, too large for float32, or equal in it.
    """
    exact = torch.tensor(values, dtype=torch.float64)
    given = exact[~exact.isnan()]
    if not len(given):
        raise InputError(f"{what} has no number")
    rounding = (given.float() - given).abs().max()
    spread = given.std(correction=0)
    if not rounding.isfinite() or (spread > 0 and rounding > _COARSE * spread):
        raise InputError(
            f"{what}: its numbers, around {float(given.mean()):.6g}, are too large for what they differ by\n"
            "Subtract a constant from them, such as the first one"
        )
    return exact.float()
