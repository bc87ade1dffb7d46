"""Targets of a user's data set that are not one class per image: several labels, or numbers.

A target of several labels is a list of their names, or 0 and 1 (None or NaN: unknown) for each of `.classes`;
one of numbers is a number with a fraction, or several numbers.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from flambeau.data.sources.targets import TargetChoice, Targets, table_targets
from flambeau.data.sources.user_samples import Label, class_label
from flambeau.errors import InputError

Target = Label | float | tuple[str, ...] | tuple[float, ...]
"""A class, a number, names of labels, or a value for each label or number."""

_BETWEEN = "\x1f"  # names of labels, as text: what none holds
_SHOWN = "|"


def target_of(label: object) -> Target:
    """The target of a sample; WrongSample if it is none."""
    value: Any = label
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.item() if np.prod(value.shape) == 1 else value.tolist()
    if isinstance(value, float):
        return value
    if not isinstance(value, list | tuple | set | frozenset):
        return class_label(label)
    values = sorted(value) if isinstance(value, set | frozenset) else value
    if all(isinstance(one, str) for one in values):
        return tuple(values)
    if all(one is None or isinstance(one, int | float) for one in values):
        return tuple(math.nan if one is None else float(one) for one in values)
    return class_label(label)


def other_targets(
    targets: Sequence[Target],
    classes: Sequence[str] | None,
    choice: TargetChoice,
    describe: Callable[[int], str],
) -> Targets | None:
    """Several labels or numbers; None if the targets are one class per image.

    InputError: they do not fit the task, or each other.
    """
    if choice.task == "classification":
        return None

    def cell(row: int, at: int = 0) -> str:
        return describe(row)

    if all(isinstance(one, tuple) and all(isinstance(x, str) for x in one) for one in targets):
        cells = [_BETWEEN.join(map(str, one)) for one in targets if isinstance(one, tuple)]
        wanted = TargetChoice("multilabel", separator=_BETWEEN)
        found = table_targets([cells], ["label"], wanted, cell, classes)
        return None if found is None else found._replace(separator=_SHOWN)
    if all(isinstance(one, int | float) for one in targets):
        is_whole = all(isinstance(one, int) for one in targets)
        if is_whole and choice.task is None:
            return None
        targets = [(float(one),) for one in targets if isinstance(one, int | float)]
    if not any(isinstance(one, tuple) for one in targets):
        return None
    rows = [_values(one, describe(row)) for row, one in enumerate(targets)]
    width = len(rows[0])
    odd = next((row for row, one in enumerate(rows) if len(one) != width), None)
    if odd is not None:
        raise InputError(
            f"{describe(odd)}: its target has {len(rows[odd])} values, that of sample 0 {width}\n"
            "Return as many for each sample, NaN for what is unknown"
        )
    if choice.task is None and all(sorted(row) == [0.0] * (width - 1) + [1.0] for row in rows):
        raise InputError(
            f"{describe(0)}: its label is a one-hot vector, as all others are\n"
            "Return the number of the class, its argmax; or give --task multilabel"
        )
    names = ["value"] if width == 1 else [f"{at}" for at in range(width)]
    names = [*classes] if classes and len(classes) == width else names
    columns = [[_text(row[at]) for row in rows] for at in range(width)]
    if width == 1:
        return table_targets(columns, names, _for_numbers(choice), cell)
    return table_targets(columns, names, choice, cell)


def _for_numbers(choice: TargetChoice) -> TargetChoice:
    return TargetChoice(choice.task or "regression", (), choice.separator)


def _values(target: Target, where: str) -> tuple[float, ...]:
    if isinstance(target, tuple) and not any(isinstance(one, str) for one in target):
        return tuple(float(one) for one in target)
    raise InputError(
        f"{where}: its target is {target!r:.60}, and others are lists of numbers\n"
        "Return the same kind for all samples"
    )


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return str(value)
