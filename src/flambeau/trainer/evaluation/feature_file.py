"""Arrays with a row per image in a .npy or .safetensors file, written batch by batch with little memory.

N: images.
"""

import contextlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk, replacing
from flambeau.trainer.evaluation.predictions_file import refuse_existing

SUFFIXES = (".npy", ".safetensors")
_TYPES = {"<f4": "F32", "<i8": "I64"}  # NumPy's and safetensors' names
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True)
class Column:
    """An array with a row per image, of `shape`; `dtype` is '<f4' or '<i8'."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)


class Add(Protocol):
    """Takes arrays of the next n images, (n, ...), by name: always the same names and shapes."""

    def __call__(self, rows: Mapping[str, NDArray[Any]]) -> None: ...


@contextlib.contextmanager
def feature_file(
    path: Path,
    num_images: int,
    *,
    about: Mapping[str, str] | None = None,
    force: bool = False,
) -> Iterator[Add]:
    """Write a file whole or not at all; yields a function that takes the next images' arrays.

    Floats become float32, others int64. NAME.npy is for one array, NAME.safetensors, with metadata `about`,
    for one or several. `num_images` is N, or more: the file gets the rows that are added. InputError: another
    ending, no such folder, an existing file without `force`, or too little disk space.
    """
    refuse_existing(path, suffixes=SUFFIXES, force=force, remedy="--force")
    disk = Disk()
    with replacing(path, disk=disk) as temporary:
        file = disk.create(temporary)
        table: _Table | None = None

        def add(rows: Mapping[str, NDArray[Any]]) -> None:
            nonlocal table
            if table is None:
                columns = {name: _column(array) for name, array in rows.items()}
                header = _header_of(path, columns, num_images, about or {})
                table = _Table(disk, file, columns, num_images, header)
                _require_space(path, table.size)
            table.add(rows)

        try:
            yield add
            if table is None:
                raise InputError(f"{path} is not written: there is no image")
            table.finish(temporary)
            disk.sync(file)
        finally:
            disk.close(file)


def _column(array: NDArray[Any]) -> Column:
    is_float = np.issubdtype(array.dtype, np.floating)
    return Column("<f4" if is_float else "<i8", array.shape[1:])


def _require_space(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise InputError(
            f"{path} will take {size / 2**20:,.2f} MiB, and {path.parent} has {free / 2**20:,.2f} MiB left\n"
            "Name a file on another disk, or fewer layers, or make maps small by --pool"
        )


class _Table:
    """Columns one after the other, after a header whose length does not depend on the number of rows."""

    def __init__(
        self,
        disk: Disk,
        file: int,
        columns: Mapping[str, Column],
        most: int,
        header: Callable[[int], bytes],
    ) -> None:
        self._disk, self._file, self._columns, self._header = disk, file, columns, header
        self._most = most
        self._done = 0
        self._length = len(header(most))

    @property
    def size(self) -> int:
        return self._length + sum(c.row_bytes for c in self._columns.values()) * self._most

    def add(self, rows: Mapping[str, NDArray[Any]]) -> None:
        for (name, column), offset in zip(
            self._columns.items(), self._offsets(self._most), strict=True
        ):
            array: Any = np.ascontiguousarray(rows[name], dtype=column.dtype)
            assert array.shape[1:] == column.shape
            self._write(offset + self._done * column.row_bytes, memoryview(array).cast("B"))
        self._done += len(array)

    def finish(self, path: Path) -> None:
        """Close the gaps of images that were not added, and write the header."""
        before, after = self._offsets(self._most), self._offsets(self._done)
        if self._done < self._most:
            reader = self._disk.open(path)
            try:
                for column, old, new in zip(self._columns.values(), before, after, strict=True):
                    self._move(reader, old, new, self._done * column.row_bytes)
            finally:
                self._disk.close(reader)
            os.truncate(path, after[-1] + self._done * [*self._columns.values()][-1].row_bytes)
        header = self._header(self._done)
        assert len(header) == self._length
        self._write(0, memoryview(header))

    def _offsets(self, num_rows: int) -> list[int]:
        """Where each column starts with this many rows."""
        offsets = [self._length]
        for column in self._columns.values():
            offsets.append(offsets[-1] + num_rows * column.row_bytes)
        return offsets[:-1]

    def _move(self, reader: int, old: int, new: int, size: int) -> None:
        """Move towards the start of the file, so that nothing is overwritten before it is read."""
        moved = 0
        while moved < size:
            os.lseek(reader, old + moved, os.SEEK_SET)
            part = self._disk.read(reader, min(_CHUNK_BYTES, size - moved))
            self._write(new + moved, memoryview(part))
            moved += len(part)

    def _write(self, offset: int, left: memoryview) -> None:
        os.lseek(self._file, offset, os.SEEK_SET)
        while left:
            left = left[self._disk.write(self._file, left) :]


def _header_of(
    path: Path, columns: Mapping[str, Column], most: int, about: Mapping[str, str]
) -> Callable[[int], bytes]:
    """A function from the number of rows, at most `most`, to the header, which always has the same length."""
    if path.suffix.lower() == ".safetensors":
        length = -(-len(_safetensors_text(columns, most, about)) // 8) * 8
        start = length.to_bytes(8, "little")
        return lambda num_rows: start + _safetensors_text(columns, num_rows, about).ljust(length)
    if len(columns) > 1:
        raise InputError(
            f"{path} holds one array: name one layer, or a file that ends in .safetensors"
        )
    (column,) = columns.values()
    return lambda num_rows: _npy_header(column, num_rows)


def _npy_header(column: Column, num_rows: int) -> bytes:
    header = io.BytesIO()
    array = {"descr": column.dtype, "fortran_order": False, "shape": (num_rows, *column.shape)}
    np.lib.format.write_array_header_1_0(header, array)  # with room for a longer first number
    return header.getvalue()


def _safetensors_text(
    columns: Mapping[str, Column], num_rows: int, about: Mapping[str, str]
) -> bytes:
    """The header's JSON, which spaces can follow: https://github.com/huggingface/safetensors#format."""
    # Bytes of a path that are not text would make it unreadable.
    texts = {name: text.encode(errors="backslashreplace").decode() for name, text in about.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **texts}}
    end = 0
    for name, column in columns.items():
        start, end = end, end + num_rows * column.row_bytes
        shape = [num_rows, *column.shape]
        entries[name] = {
            "dtype": _TYPES[column.dtype],
            "shape": shape,
            "data_offsets": [start, end],
        }
    return json.dumps(entries).encode()
