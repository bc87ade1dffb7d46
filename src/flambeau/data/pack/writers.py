"""The writers of `flambeau pack`: one function per format, which yields a function that adds a record."""

import contextlib
import errno
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple, Self, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.pack.encode_images import CannotStore, Layout, suffix_of
from flambeau.data.pack.shard_plan import record_paths
from flambeau.data.pack.table_files import open_table_writer
from flambeau.data.sources.arrays.tensorstore_file import write_store
from flambeau.data.sources.lmdb_file import image_key
from flambeau.data.sources.packed_formats import FORMATS
from flambeau.data.sources.packed_targets import TargetHead, as_mark
from flambeau.data.sources.source import Source
from flambeau.data.sources.tar_masks import MASK
from flambeau.data.sources.tar_targets import as_json
from flambeau.data.sources.tfrecord_file import SEPARATOR, TASK
from flambeau.images.decode import Stored
from flambeau.optional_packages import extra
from flambeau.recipes.data.lmdb_records import LMDBWriter
from flambeau.recipes.data.recordio import IRHeader, RecordWriter, pack
from flambeau.recipes.data.tar_shards import TarWriter
from flambeau.recipes.data.tf_example import build_example
from flambeau.recipes.data.tfrecord import TFRecordWriter

Label = int | float | Tensor | bytes


class Record(NamedTuple):
    """An image to be written; `label`: number of its class, label vector, or mask as a file.

    `class_name` is '' if the label is no class.
    """

    key: str
    number: int
    label: Label
    class_name: str
    image: Stored


_HDF5_EXTRA = 1 << 13  # bytes besides the arrays; measured with h5py 3.16: 2,048

Write = Callable[[Record], None]
_CLASSES = TargetHead("classification")


def open_writer(
    kind: str, path: Path, layout: Layout | None, head: TargetHead = _CLASSES
) -> AbstractContextManager[Write]:
    """A function that adds records to a new file; `layout` is None for image files."""
    if kind in _SAVERS:
        return _arrays(path, layout, _SAVERS[kind])
    return _WRITERS[kind](path, head)


def require_package(kind: str) -> None:
    """InputError if the package that writes a format is missing."""
    package = FORMATS[kind].package
    if package is not None:
        extra(package, what=f"writing {kind}")


def keys_for(kind: str, source: Source) -> list[str]:
    """The images' names in a file of a format, which decide what is held out: their own if possible."""
    names = list(source.names)
    if kind in ("tar", "zip", "folder"):
        return record_paths(source, dots=kind == "folder")
    unique = len(set(names)) == len(names)
    if kind == "rec" and not (unique and all(re.fullmatch(r"0|[1-9]\d{0,17}", n) for n in names)):
        return list(map(str, range(len(names))))
    return _lmdb_keys(source) if kind == "lmdb" else names


def _lmdb_keys(source: Source) -> list[str]:
    classes = [source.classes[label] for label in source.labels.tolist()]

    def keys(names: Sequence[str]) -> list[str]:
        made = (image_key(*pair) for pair in zip(classes, names, strict=True))
        return [key.decode(errors="surrogateescape") for key in made]

    image_keys = keys(source.names)
    if len(set(image_keys)) == len(image_keys):
        return image_keys
    return keys([f"{number:08}" for number in range(len(classes))])


@contextlib.contextmanager
def _rec(path: Path, head: TargetHead) -> Iterator[Write]:
    with RecordWriter(path) as writer:

        def write(record: Record) -> None:
            assert isinstance(record.image, bytes)
            header = IRHeader(0, record.label, record.number, as_mark(head))
            try:
                writer.write(pack(header, record.image), key=int(record.key))
            except ValueError as error:
                raise CannotStore(f"it cannot be put into a .rec file: {error}") from error

        yield write


@contextlib.contextmanager
def _tfrecord(path: Path, head: TargetHead) -> Iterator[Write]:
    words = {TASK: head.task.encode(), SEPARATOR: (head.separator or "").encode()}
    words = words if head.has_vectors else {}
    with TFRecordWriter(path) as writer:

        def write(record: Record) -> None:
            features = {
                "image/encoded": record.image,
                "image/class/label": record.label,
                **(words or {"image/class/text": record.class_name.encode()}),
                "image/filename": record.key.encode(errors="surrogateescape"),
            }
            writer.write(build_example(features))

        yield write


class ZipWriter:
    """Writes a zip as `TarWriter` a tar; stored: images do not get smaller."""

    def __init__(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path, "x")

    def write(self, key: str, sample: Mapping[str, bytes]) -> None:
        for extension, data in sample.items():
            name = f"{key}.{extension}"
            try:
                self._archive.writestr(zipfile.ZipInfo(name), data)  # dated 1980
            except UnicodeEncodeError as error:
                raise CannotStore(f"a zip has no name such as {name!r}: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()


@contextlib.contextmanager
def _samples(
    path: Path, head: TargetHead, writer: Callable[[Path], TarWriter | ZipWriter]
) -> Iterator[Write]:
    with writer(path) as samples:
        yield lambda record: samples.write(record.key, _sample(record, head))


def _sample(record: Record, head: TargetHead) -> dict[str, bytes]:
    assert isinstance(record.image, bytes)
    if isinstance(record.label, bytes):
        label = {MASK: record.label}
    elif isinstance(record.label, Tensor):
        label = {"json": as_json(head.names, record.label.tolist(), head)}
    else:
        label = {"cls": b"%d" % record.label}
    return {suffix_of(record.image)[1:]: record.image, **label}


@contextlib.contextmanager
def _lmdb(path: Path, head: TargetHead) -> Iterator[Write]:
    with LMDBWriter(path) as writer:

        def write(record: Record) -> None:
            assert isinstance(record.image, bytes)
            writer.write(record.key.encode(errors="surrogateescape"), record.image)

        yield write


@contextlib.contextmanager
def _folder(path: Path, head: TargetHead) -> Iterator[Write]:
    path.mkdir(parents=True, exist_ok=True)

    def write(record: Record) -> None:
        assert isinstance(record.image, bytes)
        target = path / (record.key + suffix_of(record.image))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(record.image)

    yield write


@contextlib.contextmanager
def _table(path: Path, head: TargetHead, kind: str) -> Iterator[Write]:
    with open_table_writer(kind, path, head) as add:

        def write(record: Record) -> None:
            assert isinstance(record.image, bytes)
            add(record.image, record.key, record.label)

        yield write


# ---------------------------------------------------------------- arrays


Arrays = dict[str, NDArray[Any]]
Saver = Callable[[Path, Arrays], None]


@contextlib.contextmanager
def _arrays(path: Path, layout: Layout | None, save: Saver) -> Iterator[Write]:
    """Images of one layout, or (without one) concatenated image files and their offsets.

    They are first written into a temporary file, because their number is known only at the end.
    """
    labels: list[Any] = []
    ends = [0]
    joined = path.with_name(f".{path.name}.images")
    try:
        with joined.open("xb") as file:

            def write(record: Record) -> None:
                file.write(as_buffer(record.image))
                labels.append(record.label)
                ends.append(file.tell())

            yield write
        shape, dtype = (
            ((len(labels), *layout.shape), layout.dtype) if layout else ((ends[-1],), "uint8")
        )
        images: NDArray[Any] = np.memmap(joined, np.dtype(dtype), "r+", shape=shape)
        # The images come last: if the end of the file is lost, those before it keep their labels.
        arrays: Arrays = {"labels": np.array(labels, np.int64)}
        arrays |= {} if layout else {"offsets": np.array(ends, np.int64)}
        save(path, {**arrays, "images": images})
    finally:
        joined.unlink(missing_ok=True)


def as_buffer(image: Stored) -> Any:
    """The bytes of an image file or of pixels, without a copy where possible."""
    return image if isinstance(image, bytes) else np.ascontiguousarray(image).data.cast("B")


def _save_npy(path: Path, arrays: Arrays) -> None:
    for name, array in (
        (path.name, arrays["images"]),
        (f"{path.stem}_labels.npy", arrays["labels"]),
    ):
        with path.with_name(name).open("xb") as file:
            # Not the file itself: into one NumPy (2.4) writes through a buffer of C, and says nothing when
            # the disk fails as that is emptied.
            sink = cast(IO[bytes], SimpleNamespace(write=file.write))
            np.lib.format.write_array(sink, array, allow_pickle=False)


def _save_npz(path: Path, arrays: Arrays) -> None:
    # The keyword allow_pickle came with numpy 2.3; earlier ones would save an array of that name.
    np.savez(path, **arrays)  # type: ignore[arg-type]


def _save_hdf5(path: Path, arrays: Arrays) -> None:
    """Contiguous, so that images are read by offset."""
    h5py = extra("h5py", what="writing HDF5")
    _require_room(path, sum(array.nbytes for array in arrays.values()) + _HDF5_EXTRA)
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)


def _require_room(path: Path, size: int) -> None:
    """OSError if there is no room: HDF5 2.0.0 crashes the process when it cannot close a file."""
    if hasattr(os, "posix_fallocate"):
        try:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            if error.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EFBIG,
            ):  # else not for lack of room
                raise
        path.unlink()


def _save_store(path: Path, arrays: Arrays, driver: str) -> None:
    """One chunk per image; tensorstore writes arrays, but not the group that contains them."""
    path.mkdir()
    if driver == "n5":
        (path / "attributes.json").write_text('{"n5": "2.5.0"}', encoding="utf-8")
    else:
        group = '{"zarr_format": 3, "node_type": "group", "attributes": {}}'
        (path / "zarr.json").write_text(group, encoding="utf-8")
    for name, array in arrays.items():
        write_store(path / name, driver, array)


def _save_pth(path: Path, arrays: Arrays) -> None:
    try:
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    except RuntimeError as error:  # torch does not report the error of the disk
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path)) from error


TABLES = ("parquet", "arrow")
_WRITERS: dict[str, Callable[[Path, TargetHead], AbstractContextManager[Write]]] = {
    **{kind: partial(_table, kind=kind) for kind in TABLES},
    "rec": _rec,
    "tfrecord": _tfrecord,
    "tar": partial(_samples, writer=TarWriter),
    "zip": partial(_samples, writer=ZipWriter),
    "lmdb": _lmdb,
    "folder": _folder,
}
_SAVERS: dict[str, Saver] = {
    "npy": _save_npy,
    "npz": _save_npz,
    "hdf5": _save_hdf5,
    "n5": partial(_save_store, driver="n5"),
    "zarr": partial(_save_store, driver="zarr3"),
    "pth": _save_pth,
}
