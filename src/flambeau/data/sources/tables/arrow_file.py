"""Labelled images in an Arrow file, streamed or with a footer, by their offsets."""

import os
import struct
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flambeau.data.sources.arrays.npy_pth import open_with_owner, read_at
from flambeau.data.sources.class_names_file import chosen_labels, named_labels
from flambeau.data.sources.fingerprint import file_fingerprint
from flambeau.data.sources.index_cache import joined, split_texts
from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.masks.masked_source import MaskedSource
from flambeau.data.sources.sample_blocks import group_blocks
from flambeau.data.sources.tables.columns import Columns, choose_columns
from flambeau.data.sources.tables.mask_columns import mask_columns, masked_table
from flambeau.data.sources.tables.split_columns import SplitColumns, split_columns
from flambeau.data.sources.tables.target_cells import TableTargets, other_targets
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import FOUND, TargetChoice
from flambeau.errors import DamagedData, InputError, unreadable
from flambeau.optional_packages import extra
from flambeau.regular_file import read_file

_MAGIC = b"ARROW1"  # of a file with a footer
_NO_SPLIT = SplitColumns()
_NO_LABEL = -1  # Hugging Face's value for a missing label


class ArrowSource:
    """Images in an Arrow file, in its order.

    `choose_columns` finds the columns. An image is a file as bytes, else the file at its path, relative to
    the table's folder. All labels are read once.

    Args:
        data: the Arrow file with its images, if another.
        unread: columns of the table that are not in that file.
        alone: no file beside the table is read: a row with only a path is refused.
        row_groups: (G,) rows of each row group of a Parquet file.

    Attributes:
        column: the schema's part with the images' bytes, as Parquet names it.
        is_copied: images are read from another file than the table.
        image_sizes, image_blocks: see `image_blocks`.
    """

    def __init__(
        self,
        path: Path,
        *,
        data: Path | None = None,
        unread: tuple[str, ...] = (),
        labelled: bool = True,
        targets: TableTargets | None = None,
        image: str | None = None,
        split: SplitColumns = _NO_SPLIT,
        alone: bool = False,
        row_groups: NDArray[np.int64] | None = None,
    ) -> None:
        self._path = path
        self.groups, self.parts = split.groups, split.parts
        self._data = data or path
        self.task: TaskName = "classification"
        self.separator: str | None = None
        try:
            has_classes = labelled and targets is None
            table = _read(path, self._data, labelled=has_classes, image=image)
            read = (*split.columns, *(() if targets is None else targets.columns))
            columns = tuple(name for name in unread or table.columns.unread if name not in read)
            self.left_out: tuple[LeftOut, ...] = (LeftOut(str(path), columns=columns),)
            self._starts, self._sizes, self._paths = table.starts, table.sizes, table.paths
            self.column = table.columns.image + ".bytes" * table.columns.is_struct
            self.is_copied = self._data != path
            self.image_sizes = np.maximum(self._sizes, 0)
            if row_groups is not None:
                self.image_blocks = group_blocks(self.image_sizes, row_groups)
            if alone:
                self._refuse_paths()
            if targets is None:
                self.classes, self.labels = _classes_and_labels(table, path, self.describe)
            else:
                self.task, self.classes, self.labels, self.separator = targets.targets
            self._file = open_with_owner(self, self._data)
            self._length = os.fstat(self._file.fileno()).st_size
            self.fingerprint = file_fingerprint(path, f"{self.labels.tolist()} {self.classes}")
        except OSError as error:
            raise unreadable(self._data, error) from error

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._file = open_with_owner(self, self._data)
        size = os.fstat(self._file.fileno()).st_size
        if size != self._length:
            raise OSError(
                f"{self._data} has {size} bytes, and had {self._length} when it was opened"
            )

    @cached_property
    def _path_texts(self) -> Sequence[str]:
        return split_texts(self._paths)

    @cached_property
    def names(self) -> Sequence[str]:
        paths = self._path_texts
        if all(paths) and len(set(paths)) == len(paths):
            return paths
        return list(map(str, range(len(self))))

    def __len__(self) -> int:
        return len(self._starts)

    def describe(self, index: int) -> str:
        return f"{self._path}, row {index}"

    def _refuse_paths(self) -> None:
        for index in np.flatnonzero(self._sizes < 0).tolist():
            if self._path_texts[index]:
                raise InputError(
                    f"{self.describe(index)}: it holds the path of an image, and not its bytes\n"
                    "Pack the table where these files are, and upload what that gives: "
                    "flambeau pack SRC NAME.parquet"
                )

    def read(self, index: int) -> bytes:
        start, size = int(self._starts[index]), int(self._sizes[index])
        if size >= 0:
            return read_at(self._file, start, size)
        return read_path(self._path, self._path_texts[index])


def read_path(table: Path, name: str) -> bytes:
    """The image at the path that a row has instead of bytes."""
    if not name:
        raise OSError("the row holds no image: neither bytes nor a path")
    if "://" in name:
        raise OSError(f"the row holds no bytes, but the address {name[:200]}")
    return read_file(table.parent / name)


def open_arrow(
    path: Path, *, labelled: bool = True, choice: TargetChoice = FOUND, alone: bool = False
) -> ArrowSource | MaskedSource:
    """The images of an Arrow file, with their classes or other targets; `alone` as of `ArrowSource`."""
    targets = None
    masks = None
    split = _NO_SPLIT
    if labelled:
        pa = extra("pyarrow", what=f"{path}")
        try:
            with pa.memory_map(str(path)) as mapped:
                buffer = mapped.read_buffer()
                schema, batches = arrow_batches(pa, path, buffer)
                masks = mask_columns(schema, path, choice)
                targets = other_targets(path, schema, batches, choice) if masks is None else None
                schema, batches = arrow_batches(pa, path, buffer)
                split = split_columns(path, schema, batches, choice)
        except InputError:
            raise
        except OSError as error:  # pyarrow raises it for damage, too
            is_of_disk = error.errno is not None
            raise (unreadable if is_of_disk else damaged_table)(path, error) from error
        except (pa.ArrowException, struct.error, ValueError) as error:
            raise damaged_table(path, error) from error
    if masks is None:
        return ArrowSource(path, labelled=labelled, targets=targets, split=split, alone=alone)

    def opened(column: str) -> ArrowSource:
        return ArrowSource(path, labelled=False, image=column, split=split, alone=alone)

    return masked_table(path, masks, choice, opened)


class Batch(NamedTuple):
    """The rows of a part of a table: images as pyarrow's bytes, null without; `paths` '' without a path."""

    images: Any
    paths: list[str]
    labels: list[int | str | None]


def batch_of(pa: Any, record_batch: Any, columns: Columns) -> Batch:
    """Images, paths and labels of a pyarrow.RecordBatch, whose arrays are validated first."""
    images = record_batch.column(columns.image)
    images.validate(full=True)
    paths = [""] * len(images)
    if columns.is_struct:
        parts = dict(zip([field.name for field in images.type], images.flatten(), strict=True))
        images = parts["bytes"]
        stored_paths = parts.get("path")
        if stored_paths is not None and (
            pa.types.is_string(stored_paths.type) or pa.types.is_large_string(stored_paths.type)
        ):
            # No path contains zeros, which would end a text of `joined`.
            paths = [(text or "").replace("\0", "") for text in stored_paths.to_pylist()]
    labels: list[Any] = [None] * len(paths)
    if columns.label is not None:
        column = record_batch.column(columns.label)
        column.validate(full=True)
        if pa.types.is_dictionary(column.type):
            words = column.dictionary.to_pylist()
            labels = [
                None if index is None else words[index] for index in column.indices.to_pylist()
            ]
        else:
            labels = column.to_pylist()
    return Batch(images, paths, [int(k) if isinstance(k, bool) else k for k in labels])


def arrow_batches(pa: Any, path: Path, buffer: Any) -> tuple[Any, Iterator[Any]]:
    """Schema and record batches of a mapped Arrow file, not copied.

    InputError: compressed batches, which could take any memory.
    """
    is_file = bytes(buffer[: len(_MAGIC)]) == _MAGIC
    messages = pa.ipc.MessageReader.open_stream(buffer.slice(8 if is_file else 0))
    for message in messages:
        if _is_compressed(message):
            raise InputError(
                f"{path}: its batches are compressed, and images are read where they lie\n"
                "Write it without compression, or as a Parquet file"
            )
    if not is_file:
        stream = pa.ipc.open_stream(buffer)
        return stream.schema, iter(stream)
    reader = pa.ipc.open_file(buffer)
    return reader.schema, map(reader.get_batch, range(reader.num_record_batches))


def damaged_table(path: Path, error: BaseException | str) -> DamagedData:
    """The error for a table that pyarrow cannot read."""
    return DamagedData(f"{path} is damaged or cut short: {_reason(error)}\nCopy or make it again")


def _reason(error: BaseException | str) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


class _Table(NamedTuple):
    columns: Columns
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]  # -1 for a row without bytes
    paths: NDArray[np.uint8]  # of `joined`
    labels: list[int | str | None]


def _read(path: Path, data: Path, *, labelled: bool, image: str | None) -> _Table:
    """Offsets of the images and labels of all rows."""
    pa = extra("pyarrow", what=f"{path}")
    starts = [np.empty(0, np.int64)]
    sizes = [np.empty(0, np.int64)]
    paths = list[str]()
    labels: list[int | str | None] = []
    try:
        with pa.memory_map(str(data)) as mapped:
            buffer = mapped.read_buffer()
            schema, batches = arrow_batches(pa, path, buffer)
            columns = choose_columns(schema, path, labelled=labelled, image=image)
            for record_batch in batches:
                batch = batch_of(pa, record_batch, columns)
                offsets, lengths = _offsets(batch.images, buffer)
                starts.append(offsets)
                sizes.append(lengths)
                paths += batch.paths
                labels += batch.labels
    except (pa.ArrowException, struct.error, ValueError, OSError) as error:
        if isinstance(error, InputError) or getattr(error, "errno", None) is not None:
            raise
        if data == path:
            raise damaged_table(path, error) from error
        raise DamagedData(
            f"{data}, the copy of {path}, is damaged: {_reason(error)}\nRemove it: it is made again"
        ) from error
    return _Table(columns, np.concatenate(starts), np.concatenate(sizes), joined(paths), labels)


def _offsets(images: Any, buffer: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and size of each image in the mapped file; the size is -1 for a row without bytes."""
    _, ends, data = images.buffers()
    if ends is None or data is None or not data.size:
        sizes = np.zeros(len(images), np.int64)
        starts = np.zeros(len(images), np.int64)
    else:
        wide = np.int64 if str(images.type).startswith("large") else np.int32
        offsets = np.frombuffer(ends, wide)[images.offset : images.offset + len(images) + 1]
        offsets = offsets.astype(np.int64) + (data.address - buffer.address)
        starts = offsets[:-1]
        sizes = np.diff(offsets)
        if int(offsets[0]) < 0 or int(offsets[-1]) > buffer.size:
            raise ValueError("images that do not lie in the file")
    return starts, np.where(images.is_null().to_numpy(zero_copy_only=False), -1, sizes)


def _classes_and_labels(table: _Table, path: Path, describe: Any) -> tuple[tuple[str, ...], Any]:
    columns = table.columns
    if columns.label is None or not table.labels:
        return named_labels([0] * len(table.labels), path, describe, labelled=False)
    for index, label in enumerate(table.labels):
        if (reason := no_label(label, columns)) is not None:
            raise InputError(
                f"{describe(index)}: {reason}\n"
                "Give it one, or leave the part without labels out, which flambeau predict reads; if an "
                "image may have several labels or none, give --task multilabel"
            )
    labels = [label for label in table.labels if label is not None]
    if columns.classes is None:
        return named_labels(labels, path, describe)
    return chosen_labels(labels, columns.classes, f"{path}: {columns.label}", describe)


def no_label(label: int | str | None, columns: Columns) -> str | None:
    """Why a row has no label for training; None if it has one."""
    if label is None or label == "":
        return f"no label: {columns.label!r} is null or empty"
    if label == _NO_LABEL and columns.classes is not None:
        return f"no label: {columns.label!r} is {_NO_LABEL}"
    return None


def _is_compressed(message: Any) -> bool:
    """Whether a message's record batch is compressed (Message.fbs, field 3 of RecordBatch)."""
    data = message.metadata.to_pybytes()

    def field(table: int, number: int) -> int | None:
        """The position of a field of a flatbuffer's table; None if it is absent."""
        vtable = table - struct.unpack_from("<i", data, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", data, vtable)[0]:
            return None
        offset = struct.unpack_from("<H", data, vtable + 4 + 2 * number)[0]
        return table + offset if offset else None

    def table_in(position: int) -> int:
        return int(position + struct.unpack_from("<I", data, position)[0])

    header = field(table_in(0), 2)
    if message.type not in ("record batch", "dictionary") or header is None:
        return False
    batch = table_in(header)
    if message.type == "dictionary":
        inner = field(batch, 1)
        if inner is None:
            return False
        batch = table_in(inner)
    return field(batch, 3) is not None
