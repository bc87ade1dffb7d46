"""Targets in the columns of a table other than the class in its column of labels.

Cells become texts like those of a listing. A column may hold lists of labels, such as Hugging Face's
`List(ClassLabel)`, or lists of 0 and 1, a place per label.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flambeau.data.sources.class_names_file import chosen_labels, known_classes, named_labels
from flambeau.data.sources.listing import numbers_or_words
from flambeau.data.sources.packed_targets import TargetHead, of_metadata
from flambeau.data.sources.tables.columns import LABELS, column_named, features_of, image_column
from flambeau.data.sources.targets import (
    TargetChoice,
    Targets,
    is_indicator,
    named_column,
    table_targets,
)
from flambeau.data.sources.vector_targets import Value, label_value, vector_targets
from flambeau.errors import DamagedData, InputError
from flambeau.optional_packages import extra

PACKED_COLUMN = "labels"
"""Where `flambeau pack` writes targets that are no classes: positions of labels, or a value for each name."""
_BETWEEN = "\x1f"  # labels of a list, as text: what no label holds
_SHOWN = "|"  # ... and how messages and files write it
_LABELS = (*LABELS, "tag", "tags", "classes")


class TableTargets(NamedTuple):
    targets: Targets
    columns: tuple[str, ...]


def other_targets(
    path: Path, schema: Any, batches: Iterator[Any], choice: TargetChoice
) -> TableTargets | None:
    """The targets of a table; None if its column of labels has one class per image.

    Pyarrow's batches are read if a column may hold such targets. InputError: no such column, or cells that do
    not fit the task.
    """
    pa = extra("pyarrow", what=f"{path}")
    features = features_of(schema.metadata or {}, path)
    image = image_column(schema, path)
    types = {field.name: field.type for field in schema if field.name != image}
    declared = [name for name in types if features.get(name, {}).get("_type") == "ClassLabel"]
    head = of_metadata(schema.metadata, path)
    if head is not None and head.has_vectors and not (choice.columns and choice.is_wish):
        names = [name for name in types if name == PACKED_COLUMN]
    else:
        head = None
        names = _candidates(pa, path, types, choice, has_classes=bool(declared))
    if not names:
        return None
    columns: dict[str, list[object]] = {name: [] for name in names}
    for batch in batches:
        for name in names:
            column = batch.column(name)
            column.validate(full=True)
            columns[name] += column.to_pylist()
    if head is not None:
        return TableTargets(_of_packed(path, head, columns[names[0]], choice), tuple(names))
    if len(names) == 1 and _is_list(pa, types[names[0]]):
        found = _of_lists(path, names[0], columns[names[0]], types[names[0]], features, pa, choice)
        return TableTargets(found, tuple(names))
    texts = {name: [_text(value) for value in values] for name, values in columns.items()}
    if not choice.columns and column_named(types, _LABELS) is None:
        names = [name for name in names if is_indicator(texts[name])]
        if len(names) < 2:
            return None
    cells = [texts[name] for name in names]

    def cell(row: int, at: int) -> str:
        return f"{path}, row {row}, column {names[at]}"

    targets = table_targets(cells, names, choice, cell, known_classes(path))
    if targets is None and choice.columns:
        targets = _of_classes(path, names[0], cells[0], features, lambda row: cell(row, 0))
    return None if targets is None else TableTargets(targets, tuple(names))


def _candidates(
    pa: Any, path: Path, types: Mapping[str, Any], choice: TargetChoice, *, has_classes: bool
) -> list[str]:
    """The columns that may hold targets, by what the user says, by their names, or by their types."""
    known = choice.columns and (choice.is_wish or {*choice.columns} <= {*types})
    if known:
        found = [named_column(wanted, [*types], f"{path} has") for wanted in choice.columns]
        return [[*types][at] for at in found]
    label = column_named(types, _LABELS)
    if label is not None:
        kind = types[label]
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        # A whole number is a class, unless the user says otherwise.
        may_be_other = choice.task not in (None, "classification") or not pa.types.is_integer(kind)
        return [label] if may_be_other else []
    if has_classes or choice.task == "classification":
        return []
    checks = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating)
    return [name for name, kind in types.items() if any(is_it(kind) for is_it in checks)]


def packed_vector(value: object, head: TargetHead) -> list[float]:
    """The targets in a cell of a table that flambeau packed; ValueError for another cell."""
    length = len(head.names)
    if not isinstance(value, list):
        raise ValueError("no list")
    if head.separator is None:
        if len(value) != length:
            raise ValueError(f"{len(value)} values for {length} names")
        return [math.nan if one is None else float(one) for one in value]
    if not all(isinstance(one, int) and 0 <= one < length for one in value):
        raise ValueError(f"a label that is none of {length}")
    return [float(at in value) for at in range(length)]


def _of_packed(
    path: Path, head: TargetHead, cells: Sequence[object], choice: TargetChoice
) -> Targets:
    values = list[Value]()
    for row, value in enumerate(cells):
        try:
            values.append(label_value(torch.tensor(packed_vector(value, head))))
        except (ValueError, TypeError) as error:
            raise DamagedData(
                f"{path}, row {row}, column {PACKED_COLUMN}: {error}\nCopy or make it again"
            ) from error
    wanted = dataclasses.replace(choice, task=choice.task or head.task)
    found = vector_targets(
        values, path, wanted, lambda row: f"{path}, row {row}", said=head, names=head.names
    )
    if found is None:
        raise InputError(
            f"{path} has targets for {head.task}, and not for {choice.task}\nLeave --task out"
        )
    return found


def _is_list(pa: Any, kind: Any) -> bool:
    checks = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_it(kind) for is_it in checks)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, float):
        return "" if math.isnan(value) else repr(value)
    return str(value)


def _of_lists(
    path: Path,
    name: str,
    values: Sequence[Any],
    kind: Any,
    features: Mapping[str, Any],
    pa: Any,
    choice: TargetChoice,
) -> Targets:
    """Several labels per image, or numbers, of lists."""

    def cell(row: int, at: int = 0) -> str:
        return f"{path}, row {row}, column {name}"

    if pa.types.is_floating(kind.value_type) or pa.types.is_boolean(kind.value_type):
        widths = {len(value) for value in values if value is not None}
        if len(widths) != 1:
            raise InputError(
                f"{path}: the lists of column {name!r} have {len(widths)} different lengths\n"
                "Give each image as many values, null for one that is unknown"
            )
        [width] = widths
        known_names = known_classes(path) or ()
        names = [f"{name}_{at}" for at in range(width)]
        names = [*known_names] if len(known_names) == width else names
        missing = [None] * width
        rows = [missing if value is None else value for value in values]
        cells = [[_text(row[at]) for row in rows] for at in range(width)]
        targets = table_targets(cells, names, dataclasses.replace(choice, columns=()), cell)
        assert targets is not None
        return targets
    words = (features.get(name) or {}).get("feature") or {}
    class_names = words.get("names") if isinstance(words, Mapping) else None
    texts = [
        _BETWEEN.join(_word(one, class_names, cell(row)) for one in value or [])
        for row, value in enumerate(values)
    ]
    wanted = TargetChoice("multilabel", separator=_BETWEEN)
    known = class_names if isinstance(class_names, list) else known_classes(path)
    targets = table_targets([texts], [name], wanted, cell, known)
    assert targets is not None
    return targets._replace(separator=_SHOWN)


def _word(label: object, class_names: object, where: str) -> str:
    if not isinstance(class_names, list) or not isinstance(label, int):
        return _text(label)
    if not 0 <= label < len(class_names):
        raise InputError(f"{where}: label {label} is none of the {len(class_names)} classes")
    return str(class_names[label])


def _of_classes(
    path: Path, name: str, cells: Sequence[str], features: Mapping[str, Any], cell: Any
) -> Targets:
    """The classes in a column that the user names."""
    if "" in cells:
        raise InputError(
            f"{cell(cells.index(''))} is empty\nGive each image a class; if it may have "
            "several labels or none, give --task multilabel"
        )
    labels = numbers_or_words(cells, cell)
    names = (features.get(name) or {}).get("names")
    if isinstance(names, list):
        classes, numbers = chosen_labels(labels, [*map(str, names)], f"{path}: {name}", cell)
    else:
        classes, numbers = named_labels(labels, path, cell, may_be_several=True)
    return Targets("classification", classes, numbers)
