"""Labelled images in a RecordIO file."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from flambeau.data.sources.class_names_file import named_labels
from flambeau.data.sources.fingerprint import file_fingerprint
from flambeau.errors import DamagedData, InputError, unreadable
from flambeau.recipes.data.recordio import RecordError, RecordReader, unpack


class RecordSource:
    """Images in a .rec file, each after an IRHeader with its label.

    The label is a number, a vector of one number, or a one-hot vector; other vectors are refused.
    The class names are the lines of NAME.classes.txt beside NAME.rec, NAME_train.rec or NAME_val.rec;
    without that file they are the numbers from 0 to the largest label.
    All records are read once, for their labels.
    """

    def __init__(self, path: Path, *, labelled: bool = True) -> None:
        try:
            self._reader = RecordReader(path)
            self._width = 0  # of the label vectors, once one has been seen
            labels = [self._label(index) if labelled else 0 for index in range(len(self))]
            self.classes, self.labels = named_labels(labels, path, self.describe, labelled=labelled)
            index = zip(self._reader.keys, labels, strict=True)
            self.fingerprint = file_fingerprint(path, f"{list(index)} {self.classes}")
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

    def _label(self, index: int) -> int:
        record = self._reader[index]
        try:
            label = unpack(record)[0].label
        except RecordError as error:
            raise InputError(
                f"{self.describe(index)}: {error}\nExpected an IRHeader and an image in each record"
            ) from error
        if isinstance(label, Tensor):
            label = self._single(label, index)
        if not label.is_integer():
            raise InputError(
                f"{self.describe(index)}: label {label:g}\n"
                "A label is the number of a class: 0, 1, 2, ..."
            )
        return int(label)

    def _single(self, vector: Tensor, index: int) -> float:
        """The label in a vector of one number, or in a one-hot vector."""
        if len(vector) == 1:
            return float(vector[0])
        hot = vector.nonzero()[:, 0].tolist()
        self._width = self._width or len(vector)
        if len(hot) == 1 and vector[hot[0]] == 1 and len(vector) == self._width:
            return float(hot[0])
        before = "" if len(vector) == self._width else f", the records before it have {self._width}"
        raise InputError(
            f"{self.describe(index)}: {len(vector)} labels{before}\n"
            "A classifier needs one label per record: pack it with a single number, or a one-hot vector"
        )
