"""Labelled images in files from a list: of a data set, or given on a command line."""

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch

from flambeau.data.sources.fingerprint import size_of


class FileSet:
    """Images in files from a list.

    Args:
        names: N paths relative to it, with slashes.
        labels: N positions in `classes`.
    """

    def __init__(
        self, root: Path, names: Sequence[str], labels: Sequence[int], classes: Sequence[str]
    ) -> None:
        self._root = root
        self.names = tuple(names)
        self.classes = tuple(classes)
        self.labels = torch.tensor(labels, dtype=torch.int64)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.labels.tolist()} {self.classes}".encode())
        for name in self.names:
            digest.update(os.fsencode(f"{name}\0{size_of(self._root / name)}\n"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.names)

    def describe(self, index: int) -> str:
        return str(self.file_at(index))

    def file_at(self, index: int) -> Path:
        return self._root / self.names[index]

    def read(self, index: int) -> bytes:
        return self.file_at(index).read_bytes()
