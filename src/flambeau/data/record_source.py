"""Labelled images in a RecordIO file.

RecordIO 文件中的有标签图像。

Source: own; the format is that of flambeau.recipes.data.recordio.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from flambeau.data.errors import InputError
from flambeau.recipes.data.recordio import RecordError, RecordReader, unpack

_MIB = 1 << 20
_MAX_LABEL = 1 << 24  # float32, in which a record holds its label, counts no further


class RecordSource:
    """Images in a .rec file, each behind an IRHeader with its label.

    The class names are the lines of NAME.classes.txt beside NAME.rec, NAME_train.rec or NAME_val.rec;
    without such a file they are the numbers from 0 to the largest label.
    All records are read once, for their labels.

    Args:
        path: the .rec file.

    Attributes:
        names: the keys of the records.

    Raises:
        InputError: no such file, no records, a damaged file, or labels that are no class numbers.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._reader = RecordReader(path)
            self.labels = torch.tensor([self._label(index) for index in range(len(self._reader))])
            self.classes = self._read_classes(path)
            self.fingerprint = self._fingerprint()
        except RecordError as error:
            raise InputError(f"{error}\nThe file is damaged: copy or make it again") from error
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise InputError(f"{path} cannot be read: {reason}") from error

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

    def _label(self, index: int) -> int:
        record = self._reader[index]
        try:
            label = unpack(record)[0].label
        except RecordError as error:
            raise InputError(
                f"{self.describe(index)}: {error}\nExpected an IRHeader and an image in each record"
            ) from error
        if not isinstance(label, float):
            if len(label) != 1:
                raise InputError(
                    f"{self.describe(index)}: {len(label)} labels\n"
                    "A classifier needs one label a record: pack it with a single number"
                )
            label = float(label[0])
        if not (label.is_integer() and 0 <= label < _MAX_LABEL):
            raise InputError(
                f"{self.describe(index)}: label {label:g}\n"
                f"A label is the number of a class: 0, 1, 2, ... below {_MAX_LABEL}"
            )
        return int(label)

    def _read_classes(self, path: Path) -> tuple[str, ...]:
        if not len(self._reader):
            raise InputError(f"{path} holds no records")
        largest = int(self.labels.max())
        stem = path.stem.removesuffix("_train").removesuffix("_val")
        names_path = path.with_name(f"{stem}.classes.txt")
        if not names_path.exists():
            return tuple(map(str, range(largest + 1)))
        try:
            lines = names_path.read_text(encoding="utf-8-sig").rstrip().splitlines()
        except UnicodeDecodeError as error:
            raise InputError(f"{names_path} is not UTF-8 text: {error}") from error
        names = {line.strip(): number for number, line in enumerate(lines, start=1)}
        if "" in names:
            raise InputError(f"{names_path}, line {names['']} is empty; expected one class a line")
        if len(names) < len(lines):
            (name, _), *_ = Counter(map(str.strip, lines)).most_common(1)
            raise InputError(f"{names_path} names class {name!r} twice; expected one class a line")
        if largest >= len(names):
            raise InputError(
                f"{names_path} names {len(names)} classes, but {path} has label {largest}\n"
                "Expected one class a line, in the order of the labels from 0"
            )
        return tuple(names)

    def _fingerprint(self) -> str:
        path = self._reader.path
        digest = hashlib.sha256()
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            for start in (0, max(0, size - _MIB)):
                file.seek(start)
                digest.update(file.read(_MIB))
        index = zip(self._reader.keys, self.labels.tolist(), strict=True)
        digest.update(f"{size} {list(index)} {self.classes}".encode())
        return digest.hexdigest()
