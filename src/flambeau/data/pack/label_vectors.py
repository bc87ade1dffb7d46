"""Images of .rec files with label vectors, which `flambeau pack` copies though no classifier can use them."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from flambeau.data.sources.path_format import kind_of, open_path, shards_in, shards_of
from flambeau.errors import InputError
from flambeau.images.decode import Stored
from flambeau.recipes.data.recordio import RecordError, RecordReader, unpack


class VectorRecords:
    """Images of .rec files with the labels of their headers, (K,) float32 or numbers, in `vectors`."""

    def __init__(self, path: Path) -> None:
        self._source, _ = open_path(path, labelled=False)
        self.classes: tuple[str, ...] = ()
        self.labels = torch.zeros(len(self._source), dtype=torch.int64)
        try:
            self.vectors: list[Tensor | float] = [
                unpack(record)[0].label for one in _files(path) for record in RecordReader(one)
            ]
        except RecordError as error:
            raise InputError(f"{error}\nThe file is damaged: copy or make it again") from error

    @property
    def names(self) -> Sequence[str]:
        return self._source.names

    @property
    def fingerprint(self) -> str:
        values = [torch.as_tensor(vector).tolist() for vector in self.vectors]
        return hashlib.sha256(f"{self._source.fingerprint} {values}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._source)

    def describe(self, index: int) -> str:
        return self._source.describe(index)

    def read(self, index: int) -> Stored:
        return self._source.read(index)


def has_vectors(path: Path) -> bool:
    """Whether a path stands for .rec files with labels that are no one-hot vectors."""
    try:
        return any(
            _is_vector(unpack(record)[0].label)
            for one in _files(path)
            for record in RecordReader(one)
        )
    except (RecordError, OSError):
        return False


def _is_vector(label: Tensor | float) -> bool:
    if not isinstance(label, Tensor) or len(label) == 1:
        return False
    return int(label.count_nonzero()) != 1 or float(label.sum()) != 1


def _files(path: Path) -> list[Path]:
    if path.is_file():
        files = [path]
    else:
        files = shards_in(path) if path.is_dir() else shards_of(path)
    return [file for file in files if kind_of(file) == "rec"]
