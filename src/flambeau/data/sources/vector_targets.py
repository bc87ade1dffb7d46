"""Targets in the records of files without columns: label vectors of 0 and 1, or numbers.

N: images, K: labels, or numbers of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flambeau.data.sources.class_names_file import classes_file, known_classes
from flambeau.data.sources.packed_targets import TargetHead
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import TargetChoice, Targets, number_column, refuse_columns
from flambeau.errors import InputError

_MOST_CELLS = 1 << 30  # of a table of labels: 4 GiB


class Hot(NamedTuple):
    """A one-hot vector, in little memory."""

    at: int
    width: int


Value = float | Hot | Tensor
"""The label of a record: a number, a one-hot vector of two or more, or another vector."""


def refuse_separator(path: Path, choice: TargetChoice, separator: str | None) -> None:
    """InputError for another separator than that of the file, which a resumed run names."""
    if choice.separator not in (None, separator):
        refuse_columns(path, replace(choice, columns=(), group=None, split=None))


def label_value(label: float | Tensor) -> Value:
    """The label of a record, with a vector of one as its number."""
    if not isinstance(label, Tensor):
        return label
    if len(label) == 1:
        return float(label[0])
    hot = label.nonzero()[:, 0].tolist()
    is_hot = len(hot) == 1 and float(label[hot[0]]) == 1
    return Hot(hot[0], len(label)) if is_hot else label


def vector_targets(
    values: Sequence[Value],
    path: Path,
    choice: TargetChoice,
    describe: Callable[[int], str],
    *,
    said: TargetHead | None,
    names: Sequence[str] | None = None,
) -> Targets | None:
    """Several labels or numbers of all records; None if they are classes, or unknown.

    Vectors of 0, 1 and NaN are labels, unless all are one-hot; single numbers are no classes if most have a
    fraction. Else the user, or the file, must say: a vector may be a box.

    Args:
        said: what the file says of its targets.
        names: None: those of the file of class names, else counted from 0.
    """
    task = choice.task or (None if said is None else said.task)
    are_named = names is not None and len(names) > 1  # by the user, who means that many targets
    if not values or (task is None and not are_named and all(map(_may_be_class, values))):
        return None
    task = task or _found(values) or ("regression" if are_named else None)
    if task not in ("multilabel", "regression"):
        return None
    table = _table(values, describe, torch.float64 if task == "regression" else torch.float32)
    if task == "multilabel":
        fits = (table == 0) | (table == 1) | table.isnan()
        expected = "neither 0 nor 1, nor NaN for unknown"
        remedy = "A label vector says 1 where an image has it; of numbers, give --task regression"
    else:
        fits = ~table.isinf()
        expected = "no number"
        remedy = "NaN stands for a missing one"
    if not fits.all():
        row, at = (~fits).nonzero()[0].tolist()
        raise InputError(
            f"{describe(row)}: label {float(table[row, at]):g} is {expected}\n{remedy}"
        )
    names = _names(path, table.shape[1], describe(0), task) if names is None else names
    if task == "regression":
        columns = [
            number_column(column.tolist(), f"{path}: {name!r}")
            for name, column in zip(names, table.T, strict=True)
        ]
        return Targets(task, tuple(names), torch.stack(columns, 1))
    if not table.isfinite().any():
        raise InputError(f"{path}: no label of any image is known")
    return Targets(task, tuple(names), table.float(), None if said is None else said.separator)


def _may_be_class(value: Value) -> bool:
    return isinstance(value, Hot) or (not isinstance(value, Tensor) and float(value).is_integer())


def _found(values: Sequence[Value]) -> TaskName | None:
    """The task that values are for beyond doubt; a damaged one among classes does not decide it."""
    if all(not isinstance(value, Hot | Tensor) for value in values):
        numbers = torch.tensor(values, dtype=torch.float64)
        numbers = numbers[numbers.isfinite()]
        return "regression" if 2 * int((numbers.frac() != 0).sum()) > len(numbers) else None
    widths = {_width(value) for value in values}
    vectors = (value for value in values if isinstance(value, Tensor))
    is_of_bits = all(((one == 0) | (one == 1) | one.isnan()).all() for one in vectors)
    return "multilabel" if len(widths) == 1 and is_of_bits else None


def _width(value: Value) -> int:
    if isinstance(value, Hot):
        return value.width
    return len(value) if isinstance(value, Tensor) else 1


def _table(values: Sequence[Value], describe: Callable[[int], str], dtype: torch.dtype) -> Tensor:
    """(N, K); all widths are looked at before memory is taken."""
    width = _width(values[0])
    odd = next((row for row, value in enumerate(values) if _width(value) != width), None)
    if odd is not None:
        raise InputError(
            f"{describe(odd)}: {_width(values[odd])} labels, the records before it have {width}\n"
            "Give each image as many, NaN for one that is unknown"
        )
    if len(values) * width > _MOST_CELLS:
        raise InputError(f"{describe(0)}: {width} labels for {len(values)} images are too many")
    if not any(isinstance(value, Hot | Tensor) for value in values):
        return torch.tensor(values, dtype=dtype)[:, None]
    table = torch.zeros(len(values), width, dtype=dtype)
    for row, value in enumerate(values):
        if isinstance(value, Hot):
            table[row, value.at] = 1.0
        else:
            table[row] = torch.as_tensor(value)
    return table


def _names(path: Path, width: int, first: str, task: TaskName) -> Sequence[str]:
    known = known_classes(path)
    if known is not None and len(known) != width:
        raise InputError(
            f"{first}: {width} labels, and {classes_file(path)} names {len(known)}\n"
            "Correct one of the two"
        )
    if known is not None:
        return known
    return ["value"] if width == 1 and task == "regression" else [str(at) for at in range(width)]
