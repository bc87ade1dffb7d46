"""Arrays in HDF5 files.

Source: HDF5 File Format Specification 3.0, III.E (global heap), IV.A.2.l (filter pipeline); h5py's
documentation.

h5py finds the arrays; where they lie whole in the file, or in chunks that are plain, deflated, shuffled or
checksummed, they are read without it: h5py takes 120 microseconds per image, under one lock for all threads.
Other arrays (text of variable length, other filters, virtual or external data) are read through a handle
that each process opens for itself.
"""

import itertools
import math
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flambeau.data.sources.arrays.array_roles import role_of
from flambeau.data.sources.arrays.npy_pth import (
    Array,
    FileRows,
    MemoryRows,
    Rows,
    damaged,
    open_while,
    read_at,
)
from flambeau.data.sources.optional_packages import extra
from flambeau.errors import InputError

Place = tuple[int, ...]  # of a chunk in the grid of chunks

_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3  # as HDF5 numbers its filters
_REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
_HEAP = struct.Struct("<5s3xQ")  # III.E: signature and version, size
_OBJECT = struct.Struct("<H6xQ")  # index, size
_MAX_CHUNKS = 1 << 24  # 256 MiB of index; a grid of more is mostly holes


class HandleRows:
    """A data set that only the HDF5 library can read; each process opens the file for itself."""

    def __init__(self, path: Path, dataset: Any) -> None:
        self._path, self._name = path, dataset.name
        self.shape, self.dtype = dataset.shape, dataset.dtype
        self._opened: tuple[int, Any] = (-1, None)

    def read(self, start: int, stop: int) -> Array:
        process, file = self._opened
        if process != os.getpid():  # a handle of before a fork shares its state with the parent
            file = open_file(self._path)
            self._opened = os.getpid(), file
        try:
            rows: Array = file[self._name][start:stop]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"{self._name}: {_first_line(error)}") from error
        return rows


class HeapRows:
    """Vectors of uint8 of any length, such as image files; they lie in heaps, which are walked here.

    The library walks for ever where the size of an object in a heap is damaged.

    Args:
        path: the file.
        references: where each vector lies, of _REFERENCE.
    """

    def __init__(self, path: Path, references: Rows) -> None:
        self._references, self.shape = references, references.shape
        self.dtype = np.dtype(object)
        self._file = open_while(self, path)
        self._size = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, stop: int) -> Array:
        items = np.empty(stop - start, object)
        for number, reference in enumerate(self._references.read(start, stop).tolist()):
            items[number] = np.frombuffer(self._vector(*reference), np.uint8)
        return items

    def _vector(self, length: int, address: int, index: int) -> bytes:
        if not length:
            return b""
        if address + _HEAP.size > self._size:
            raise OSError(f"a heap at byte {address} of {self._size}")
        magic, size = _HEAP.unpack(read_at(self._file, address, _HEAP.size))
        if magic != b"GCOL\1" or address + size > self._size:
            raise OSError(f"no heap at byte {address}")
        at, end = address + _HEAP.size, address + size
        while at + _OBJECT.size <= end:
            number, stored = _OBJECT.unpack(read_at(self._file, at, _OBJECT.size))
            if number == index:
                if not length <= stored <= end - at - _OBJECT.size:
                    raise OSError(f"{length} bytes in the object of {stored} at byte {at}")
                return read_at(self._file, at + _OBJECT.size, length)
            if number == 0:  # free space
                break
            at += _OBJECT.size + stored + -stored % 8
        raise OSError(f"no object {index} in the heap at byte {address}")


class BlockRows:
    """An array that lies in blocks.

    The blocks of the last rows read are kept: reading images in order unpacks each block once.
    In random order a block is unpacked for each image, so blocks of one image are the best.

    Args:
        shape: of the array, row-major.
        block: shape of a block; those at the far edges may be smaller, or stick out.
        dtype: of the items.
        fetch: gives the block at a place of the grid; None where it was never written, which means `fill`.
        fill: value of what was never written.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        block: tuple[int, ...],
        dtype: np.dtype[Any],
        fetch: Callable[[Place], Array | None],
        fill: Any = 0,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._block, self._fetch, self._fill = block, fetch, fill
        self._last: tuple[int, Array] | None = None

    def read(self, start: int, stop: int) -> Array:
        depth = self._block[0]
        bands = range(start // depth, -(-stop // depth))
        parts = []
        for number in bands:
            band, first = self._band(number), number * depth
            parts.append(band[max(0, start - first) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _band(self, number: int) -> Array:
        """All rows that are in blocks with this first coordinate."""
        last = self._last  # another thread may replace it
        if last is not None and last[0] == number:
            return last[1]
        rows = min(self._block[0], self.shape[0] - number * self._block[0])
        band = np.full((rows, *self.shape[1:]), self._fill, self.dtype)
        inner = list(zip(self.shape, self._block, strict=True))[1:]
        for rest in itertools.product(*(range(-(-side // step)) for side, step in inner)):
            block = self._fetch((number, *rest))
            if block is not None:
                starts = (0, *(at * step for at, (_, step) in zip(rest, inner, strict=True)))
                target = band[
                    tuple(slice(a, a + n) for a, n in zip(starts, block.shape, strict=True))
                ]
                target[...] = block[tuple(slice(n) for n in target.shape)]
        band.flags.writeable = False  # images are views of it
        self._last = number, band
        return band


def open_file(path: Path) -> Any:
    """A file of h5py.

    Raises:
        InputError: it is damaged, or h5py is not installed.
    """
    h5py = extra("h5py", what=f"{path}")
    with path.open("rb"):
        pass  # whatever hinders that is better said by Python
    try:
        # A file system without locks, as many network drives are, is no reason to fail.
        return h5py.File(path, "r", locking="best-effort")
    except (OSError, RuntimeError, ValueError) as error:
        raise damaged(path, _first_line(error)) from error


def open_hdf5(path: Path) -> dict[str, Rows]:
    """The data sets of a file by name, and attributes that are lists of text, such as class names.

    Raises:
        InputError: it is damaged, or h5py is not installed.
    """
    found: dict[str, Rows] = {}
    with open_file(path) as file:
        h5py = extra("h5py", what=f"{path}")
        try:
            nodes: list[tuple[str, Any]] = [("", file)]
            file.visititems(lambda name, node: nodes.append((name, node)))
            for name, node in nodes:
                for key in filter(role_of, node.attrs):
                    value = np.asarray(node.attrs[key])
                    if value.ndim == 1 and value.dtype.kind in "OSU":
                        found[f"{name}/{key}" if name else key] = MemoryRows(value)
            for name, node in nodes:
                if isinstance(node, h5py.Dataset) and node.shape:
                    found[name] = _rows(path, node, h5py)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise damaged(path, _first_line(error)) from error
    return found


def _first_line(error: Exception) -> str:
    return " ".join(str(error.args[0] if error.args else error).split())[:200]


def _rows(path: Path, dataset: Any, h5py: Any) -> Rows:
    properties, dtype = dataset.id.get_create_plist(), dataset.dtype
    is_heap = h5py.check_vlen_dtype(dtype) == np.uint8 and _has_long_addresses(dataset.file)
    plain = is_heap or dtype.kind in "uifS"
    # A type that numpy has no exact equal of (12 bits of 16, say) is converted by the library.
    plain = plain and dataset.id.get_type() == h5py.h5t.py_create(dtype, logical=True)
    dtype = _REFERENCE if is_heap else dtype
    layout, userblock = properties.get_layout(), dataset.file.userblock_size
    if not plain or userblock or properties.get_external_count() or dataset.is_virtual:
        return HandleRows(path, dataset)
    if layout == h5py.h5d.CONTIGUOUS and dataset.id.get_storage_size():
        rows: Rows = FileRows(path, dataset.id.get_offset(), dataset.shape, dtype)
        return HeapRows(path, rows) if is_heap else rows
    filters = [properties.get_filter(k)[0] for k in range(properties.get_nfilters())]
    if (
        layout == h5py.h5d.CHUNKED
        and set(filters) <= {_DEFLATE, _SHUFFLE, _FLETCHER32}
        and dataset.shape[0]
        and _num_chunks(dataset) <= _MAX_CHUNKS
    ):
        chunks = _Chunks(path, dataset, dtype, filters)
        fill = np.zeros((), dtype) if is_heap else dataset.fillvalue
        rows = BlockRows(dataset.shape, dataset.chunks, dtype, chunks.fetch, fill)
        return HeapRows(path, rows) if is_heap else rows
    return HandleRows(path, dataset)


def _has_long_addresses(file: Any) -> bool:
    """Of 8 bytes, as nearly all files have."""
    return tuple(file.id.get_create_plist().get_sizes()) == (8, 8)


def _num_chunks(dataset: Any) -> int:
    return math.prod(_grid(dataset))


def _grid(dataset: Any) -> list[int]:
    return [-(-side // step) for side, step in zip(dataset.shape, dataset.chunks, strict=True)]


class _Chunks:
    """Where the chunks of a data set lie, and how to unpack them."""

    def __init__(
        self, path: Path, dataset: Any, dtype: np.dtype[Any], filters: Sequence[int]
    ) -> None:
        self._file = open_while(self, path)
        self._filters, self._shape, self._dtype = filters, dataset.chunks, dtype
        self._path, self._name, self._grid = path, dataset.name, _grid(dataset)

    @cached_property
    def _places(self) -> Array:
        """Offset, size and left-out filters by place in the grid; a file may hold many sets not needed."""
        places = np.zeros((*self._grid, 3), np.int64)
        chunks: list[Any] = []
        try:
            with open_file(self._path) as file:
                file[self._name].id.chunk_iter(chunks.append)
        except (RuntimeError, KeyError, ValueError) as error:
            raise damaged(self._path, _first_line(error)) from error
        if chunks:
            corners = np.array([chunk.chunk_offset for chunk in chunks], np.int64) // self._shape
            facts = np.array([(c.byte_offset, c.size, c.filter_mask) for c in chunks], np.uint64)
            size = os.fstat(self._file.fileno()).st_size
            if (corners < 0).any() or (corners >= self._grid).any() or (facts > size).any():
                raise damaged(self._path, f"a chunk of {self._name} lies outside it")
            places[tuple(corners.T)] = facts
        return places

    def fetch(self, place: Place) -> Array | None:
        offset, stored, left_out = self._places[place].tolist()
        if not stored:
            return None
        size = math.prod(self._shape) * self._dtype.itemsize
        try:
            data = read_at(self._file, offset, stored)
            for number in reversed(range(len(self._filters))):
                if not left_out >> number & 1:
                    data = self._undo(self._filters[number], data, size)
            if len(data) != size:
                raise OSError(f"{len(data)} bytes of data, expected {size}")
            return np.frombuffer(data, self._dtype).reshape(self._shape)
        except OSError as error:
            raise OSError(f"the chunk at byte {offset}: {error}") from error

    def _undo(self, filter_: int, data: bytes, size: int) -> bytes:
        if filter_ == _FLETCHER32:
            if _fletcher32(data[:-4]) != [n % 65535 for n in struct.unpack("<HH", data[-4:])]:
                raise OSError("its checksum is wrong")
            return data[:-4]
        if filter_ == _DEFLATE:
            # A checksum below it is packed too: four bytes more.
            inner = _FLETCHER32 in self._filters[: self._filters.index(_DEFLATE)]
            return _inflated(data, size + 4 * inner)
        return np.frombuffer(data, np.uint8).reshape(self._dtype.itemsize, -1).T.tobytes()


def _inflated(data: bytes, size: int) -> bytes:
    """At most one byte too many is unpacked to find out that there are more."""
    decompressor = zlib.decompressobj()
    try:
        unpacked = decompressor.decompress(data, size + 1)
    except zlib.error as error:
        raise OSError(f"damaged data: {error}") from error
    if not decompressor.eof:
        raise OSError(f"damaged data: no end after {len(unpacked)} bytes of {size}")
    return unpacked


def _fletcher32(data: bytes) -> list[int]:
    """Modulo 65535, where HDF5's one's-complement sums have 65535 for 0."""
    words = np.frombuffer(data + bytes(len(data) % 2), ">u2").astype(np.uint64)
    weights = np.arange(len(words), 0, -1, dtype=np.uint64)
    return [int(words.sum()) % 65535, int((words * (weights % 65535) % 65535).sum()) % 65535]
