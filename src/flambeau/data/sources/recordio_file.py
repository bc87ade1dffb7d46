"""Labelled images in a RecordIO file."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from flambeau.data.sources.class_names_file import named_labels
from flambeau.data.sources.fingerprint import file_fingerprint
from flambeau.data.sources.packed_targets import of_mark
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import FOUND, TargetChoice, refuse_columns
from flambeau.data.sources.vector_targets import (
    Hot,
    Value,
    label_value,
    refuse_separator,
    vector_targets,
)
from flambeau.errors import DamagedData, InputError, unreadable
from flambeau.recipes.data.recordio import RecordError, RecordReader, unpack


class RecordSource:
    """Images in a .rec file, each after an IRHeader with its label.

    The label is a number, a vector of one, or a one-hot vector; for other vectors see `vector_targets`. Class
    names are the lines of NAME.classes.txt beside NAME.rec, NAME_train.rec or NAME_val.rec, else the numbers
    from 0 to the largest label. All records are read once, for their labels.
    """

    def __init__(self, path: Path, *, labelled: bool = True, choice: TargetChoice = FOUND) -> None:
        self.task: TaskName = "classification"
        self.separator: str | None = None
        if labelled:
            refuse_columns(path, replace(choice, separator=None))
        try:
            self._reader = RecordReader(path)
            facts = self._read_targets(path, labelled, choice)
            if labelled:
                refuse_separator(path, choice, self.separator)
            self.fingerprint = file_fingerprint(path, facts)
        except RecordError as error:
            raise DamagedData(f"{error}\nThe file is damaged: copy or make it again") from error
        except OSError as error:
            raise unreadable(path, error) from error

    @property
    def names(self) -> Sequence[str]:
        return [str(key) for key in self._reader.keys]

    def __len__(self) -> int:
        return len(self._reader)

    def describe(self, index: int) -> str:
        return f"{self._reader.path}, record {index} (key {self._reader.keys[index]})"

    def read(self, index: int) -> bytes:
        try:
            return unpack(self._reader[index])[1]
        except RecordError as error:
            raise OSError(str(error)) from error

    def _read_targets(self, path: Path, labelled: bool, choice: TargetChoice) -> str:
        """Set the targets of all records; returns what identifies them."""
        labels = [0] * len(self)
        self.image_sizes = np.zeros(len(self), np.int64)
        if labelled:
            marks = Counter[int]()
            values = [self._value(index, marks) for index in range(len(self))]
            said = of_mark(next(iter(marks))) if len(marks) == 1 else None
            found = (
                vector_targets(values, path, choice, self.describe, said=said) if values else None
            )
            if found is not None:
                self.task, self.classes, self.labels, self.separator = found
                digest = hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()
                return f"{list(self._reader.keys)} {found[:2]} {digest} {self.separator}"
            widths = (value.width for value in values if isinstance(value, Hot))
            width = next(widths, None)
            labels = [self._class(value, index, width) for index, value in enumerate(values)]
        self.classes, self.labels = named_labels(labels, path, self.describe, labelled=labelled)
        index = zip(self._reader.keys, labels, strict=True)
        return f"{list(index)} {self.classes}"

    def _value(self, index: int, marks: Counter[int]) -> Value:
        record = self._reader[index]
        try:
            header, image = unpack(record)
        except RecordError as error:
            raise InputError(
                f"{self.describe(index)}: {error}\nExpected an IRHeader and an image in each record"
            ) from error
        marks[header.id2] += 1
        self.image_sizes[index] = len(image)
        return label_value(header.label)

    def _class(self, value: Value, index: int, width: int | None) -> int:
        """The number of a class; InputError for another value, or a vector of another width."""
        if isinstance(value, Hot) and value.width == width:
            return value.at
        if isinstance(value, Hot | Tensor):
            length = value.width if isinstance(value, Hot) else len(value)
            is_odd = width is not None and length != width
            before = f", the records before it have {width}" if is_odd else ""
            raise InputError(
                f"{self.describe(index)}: {length} labels{before}\n"
                "A classifier needs one label per record: pack it with a single number, or a one-hot vector; "
                "if its numbers are what is to be learned, give --task regression"
            )
        if not value.is_integer():
            raise InputError(
                f"{self.describe(index)}: label {value:g}\n"
                "A label is the number of a class: 0, 1, 2, ...; if numbers are to be learned, give "
                "--task regression"
            )
        return int(value)
