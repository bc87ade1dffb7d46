"""Arrays in HDF5 files, read through h5py.

Source: h5py's documentation; HDF5 File Format Specification 3.0, III.E (global heap).

Arrays stored contiguously, as in memory, are read by offset; all others through a handle that each process
opens for itself. Sizes that a file claims are compared with its length before memory is allocated.
"""

import math
import os
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flambeau.data.sources.arrays.array_roles import role_of
from flambeau.data.sources.arrays.npy_pth import (
    Array,
    FileRows,
    LoadedRows,
    MemoryRows,
    RefusedRows,
    Rows,
    absent_chunks,
    damaged,
    open_with_owner,
    read_at,
)
from flambeau.errors import InputError
from flambeau.optional_packages import extra

_REFERENCE = np.dtype([("length", "<u4"), ("address", "<u8"), ("index", "<u4")])
_HEAP = struct.Struct("<5s3xQ")  # III.E: signature and version, size
_OBJECT = struct.Struct("<H6xQ")  # index, size
# Bytes that one byte of deflated data unpacks to at most (zlib's technical details)
_MOST_PACKED = 1032
_MAX_GROUPS, _MAX_CHAIN = 64, 16  # groups to which soft links are followed; links to links
_SMALL = 1 << 24  # bytes that any file may claim
_CACHE = 1 << 27  # bytes of chunks that are kept: images read in order unpack each chunk once


class HandleRows:
    """A data set read by the HDF5 library; each process opens the file for itself.

    In random order each image unpacks a chunk: chunks of one image are best.
    """

    def __init__(self, path: Path, dataset: Any) -> None:
        self._path = path
        self._name = dataset.name
        self.shape, self.dtype = dataset.shape, dataset.dtype
        self._chunk_bytes = math.prod(dataset.chunks or (0,)) * dataset.dtype.itemsize
        self._opened: tuple[int, Any, Any] = (-1, None, None)

    def read(self, start: int, stop: int) -> Array:
        process, file, dataset = self._opened
        if process != os.getpid():  # a handle from before a fork shares its state with the parent
            file = open_file(self._path)
            dataset = None
        try:
            if dataset is None:
                dataset = _cached(file, self._name, self._chunk_bytes)
                self._opened = os.getpid(), file, dataset
            size = os.fstat(file.id.get_vfd_handle()).st_size
            if size < file.id.get_filesize():  # HDF5 reads zeros beyond the end
                raise OSError(f"the file ends at byte {size}, it was longer when opened")
            requested = (stop - start) * math.prod(self.shape[1:]) * self.dtype.itemsize
            if requested > _most(size):
                raise OSError(
                    f"{requested} bytes of {self._name} cannot be in a file of {size} bytes"
                )
            rows: Array = dataset[start:stop]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"{self._name}: {_first_line(error)}") from error
        return rows


def _cached(file: Any, name: str, chunk_bytes: int) -> Any:
    """A data set that keeps its last chunk in memory, however large: it is unpacked there anyway.

    A chunk that does not fit the cache is unpacked again for each image: a second for one of a GiB.
    """
    if chunk_bytes <= _CACHE:
        return file[name]
    h5py = extra("h5py", what=f"{file.filename}")
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    _, _, preemption = access.get_chunk_cache()
    access.set_chunk_cache(1, chunk_bytes, preemption)
    return h5py.Dataset(h5py.h5d.open(file.id, name.encode(), access))


class HeapRows:
    """Vectors of uint8, such as image files; this class itself walks the heaps that hold them.

    The library (2.0.0) loops forever, not to be interrupted, if an object's size in a heap is damaged; text
    is left to it nevertheless.
    """

    def __init__(self, path: Path, references: Rows) -> None:
        self._references = references
        self.shape = references.shape
        self.dtype = np.dtype(object)
        self._file = open_with_owner(self, path)
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
        at = address + _HEAP.size
        end = address + size
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


def open_file(path: Path) -> Any:
    h5py = extra("h5py", what=f"{path}")
    with path.open("rb"):
        pass  # Python's error is better than h5py's
    try:
        # Opening must not fail on a file system without locks, as many network drives are.
        return h5py.File(path, "r", locking="best-effort", rdcc_nbytes=_CACHE)
    except (OSError, RuntimeError, ValueError) as error:
        raise damaged(path, _first_line(error)) from error


def open_hdf5(path: Path) -> dict[str, Rows]:
    """The data sets of a file by name, and attributes that are lists of text, such as class names."""
    arrays: dict[str, Rows] = {}
    with open_file(path) as file:
        h5py = extra("h5py", what=f"{path}")
        try:
            nodes: list[tuple[str, Any]] = [("", file)]
            file.visititems(lambda name, node: nodes.append((name, node)))
            for name, node in nodes:
                for key in filter(role_of, node.attrs):
                    value = np.asarray(node.attrs[key])
                    if value.ndim == 1 and value.dtype.kind in "OSU":
                        arrays[f"{name}/{key}" if name else key] = MemoryRows(value)
            for name, node in nodes:
                if isinstance(node, h5py.Dataset) and node.shape:
                    arrays[name] = _rows(path, node, h5py)
            arrays |= _links(path, file, arrays, h5py)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise damaged(path, _first_line(error)) from error
    return arrays


def check_chunks(path: Path) -> tuple[bool, list[str]]:
    """Whether all chunks of images have checksums; and a sentence for each array with absent chunks.

    A chunk never written, or of a missing file, reads as the fill value.
    """
    checked: list[bool] = []
    absent: list[str] = []
    with open_file(path) as file:
        nodes: dict[str, Any] = {}
        file.visititems(lambda name, node: nodes.update({name: node}))
        arrays = {
            k: node for k, node in nodes.items() if math.prod(getattr(node, "shape", ()) or (0,))
        }
        for name, node in arrays.items():
            role = role_of(name)
            if role is None or role[1] == "images":
                checked.append(node.fletcher32)
            count = 1
            present = bool(node.id.get_storage_size() or node.is_virtual or node.external)
            if node.chunks:
                count = math.prod(map(lambda n, step: -(-n // step), node.shape, node.chunks))
                present = node.id.get_num_chunks()
            for source in node.virtual_sources() if node.is_virtual else ():
                if source.file_name != "." and not (path.parent / source.file_name).exists():
                    absent.append(f"{name} takes from {source.file_name}, which is not there")
            if present < count:
                absent.append(absent_chunks(name, count - present, count))
    return all(checked), absent


def _first_line(error: Exception) -> str:
    return " ".join(str(error.args[0] if error.args else error).split())[:200]


def _links(path: Path, file: Any, arrays: Mapping[str, Rows], h5py: Any) -> dict[str, Rows]:
    """Arrays behind soft links and links into other files, by the names of the links.

    An array of this file is read if only a link gives it the name of a role; other files are not opened.
    """
    links: dict[str, Any] = {}
    file.visititems_links(lambda name, link: links.update({name: link}))
    known = {None, *map(role_of, arrays)}
    named = {_address(file[name], h5py) for name in arrays if role_of(name) and name in links}
    linked: dict[str, Rows] = {}
    refused: dict[str, Rows] = {}
    groups = 0
    for name, link in links.items():
        if isinstance(link, h5py.HardLink):
            continue
        node = _target(file, links, name, h5py)
        groups += isinstance(node, h5py.Group)
        targets = {} if groups > _MAX_GROUPS else _arrays_at(name, node, file, links, h5py)
        for inner, array in targets.items():
            if role_of(inner) not in known and _address(array, h5py) not in named:
                linked[inner] = _rows(path, array, h5py)
                known.add(role_of(inner))
        if node is None:
            names = [name] if role_of(name) else [f"{name}/images", f"{name}/labels"]
            refused |= dict.fromkeys(names, RefusedRows((), _link_text(path, name, link)))
    for name, rows in refused.items():
        if role_of(name) not in known:
            linked[name] = rows
            known.add(role_of(name))
    return linked


def _target(file: Any, links: Mapping[str, Any], name: str, h5py: Any) -> Any:
    """The object in this file that a name leads to; the library itself would open other files, too."""
    for _ in range(_MAX_CHAIN):
        link = links.get(name)
        if isinstance(link, h5py.HardLink):
            return file[name]
        if not isinstance(link, h5py.SoftLink):
            return None
        start = "" if link.path.startswith("/") else name.rpartition("/")[0]
        name = "/".join(part for part in f"{start}/{link.path}".split("/") if part not in ("", "."))
        if not name:
            return file["/"]
    return None


def _arrays_at(
    name: str, node: Any, file: Any, links: Mapping[str, Any], h5py: Any
) -> dict[str, Any]:
    """The arrays that a link leads to, itself or in a group; links to groups inside are not followed."""
    nodes = {name: node}
    if isinstance(node, h5py.Group):
        above = f"{node.name}/".lstrip("/")
        below = (other for other in links if other.startswith(above))
        for other in below:
            nodes[f"{name}/{other.removeprefix(above)}"] = _target(file, links, other, h5py)
    return {k: one for k, one in nodes.items() if isinstance(one, h5py.Dataset) and one.shape}


def _address(node: Any, h5py: Any) -> int:
    """The address of an object in its file, whatever its names."""
    return int(h5py.h5o.get_info(node.id).addr)


def _link_text(path: Path, name: str, link: Any) -> str:
    other = getattr(link, "filename", None)
    if other is None:
        return f"{path}: {name} is a link to {link.path}, which is not found\nRepair or remove it"
    return (
        f"{path}: {name} is a link into another file, {other}, which is not followed\n"
        "Name that file, or copy its data into this one"
    )


def _rows(path: Path, dataset: Any, h5py: Any) -> Rows:
    properties = dataset.id.get_create_plist()
    dtype = dataset.dtype
    file = dataset.file
    # The library converts a type without an exact NumPy equivalent (such as 12 of 16 bits). With a user
    # block at the front, addresses do not count from the start of the file.
    is_plain = not file.userblock_size and dataset.id.get_type() == h5py.h5t.py_create(
        dtype, logical=True
    )
    addresses = tuple(file.id.get_create_plist().get_sizes())  # of 8 bytes in nearly all files
    is_heap = is_plain and h5py.check_vlen_dtype(dtype) == np.uint8 and addresses == (8, 8)
    if (
        is_plain
        and (is_heap or dtype.kind in "uifS")
        and properties.get_layout() == h5py.h5d.CONTIGUOUS
        and dataset.id.get_storage_size()
        and not properties.get_external_count()
    ):
        dtype = _REFERENCE if is_heap else dtype
        rows = FileRows(path, dataset.id.get_offset(), dataset.shape, dtype)
        return HeapRows(path, rows) if is_heap else rows
    is_heap = is_heap and properties.get_layout() == h5py.h5d.CHUNKED
    whole = math.prod(dataset.shape) if is_heap else 0
    size = path.stat().st_size
    needed = max(math.prod(dataset.chunks or (0,)), whole) * dtype.itemsize
    if needed > _most(size):
        reason = f"{dataset.name} has chunks of {needed} bytes, the file {size} bytes"
        return RefusedRows(dataset.shape, damaged(path, reason))
    if is_heap:
        load = partial(_references, path, dataset.name)
        return HeapRows(path, LoadedRows(path, dataset.shape, _REFERENCE, load))
    return HandleRows(path, dataset)


def _references(path: Path, name: str) -> Array:
    """The references of vectors in chunks: the library unpacks a copy of the chunks in memory, as numbers."""
    h5py = extra("h5py", what=f"{path}")
    with open_file(path) as file, h5py.File("r", "w", driver="core", backing_store=False) as memory:
        try:
            dataset = file[name]
            kind = h5py.h5t.py_create(_REFERENCE)
            facts = kind, dataset.id.get_space(), dataset.id.get_create_plist()
            copy = h5py.h5d.create(memory.id, b"references", *facts)
            chunks: list[Any] = []
            dataset.id.chunk_iter(chunks.append)
            for chunk in chunks:
                left_out, data = dataset.id.read_direct_chunk(chunk.chunk_offset)
                copy.write_direct_chunk(chunk.chunk_offset, data, left_out)
            references: Array = h5py.Dataset(copy)[()]
        except (OSError, RuntimeError, KeyError, ValueError) as error:
            raise OSError(f"{name}: {_first_line(error)}") from error
    return references


def _most(size: int) -> int:
    """Bytes that may be read at once from a file of `size` bytes: those of the best compression."""
    return max(_SMALL, _MOST_PACKED * size)
