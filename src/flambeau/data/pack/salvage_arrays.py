"""Labelled images in files of arrays that are cut short or have lost their directory: what is there of them.

Source: APPNOTE.TXT of PKWARE, 4.3.7 and 4.3.9 (local headers and data descriptors of a zip file); PyTorch's
notes on serialization semantics.

A zip file (.npz, .pth) has its directory at the end, so a cut takes it; but each member has its own header.
"""

import contextlib
import mmap
import pickle
import struct
import sys
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from flambeau.data.sources.arrays.array_roles import names_by_part, role_of
from flambeau.data.sources.arrays.array_source import ArraySource
from flambeau.data.sources.arrays.hdf5_file import open_hdf5
from flambeau.data.sources.arrays.npy_pth import (
    Array,
    FileRows,
    Rows,
    damaged,
    leaves,
    npy_header,
    open_npy,
    read_at,
)
from flambeau.errors import InputError

_LOCAL = struct.Struct("<4sHHHHHIIIHH")  # signature, flags, method, CRC, sizes ...
_DESCRIPTOR = b"PK\7\10"
_HAS_DESCRIPTOR = 8  # a flag: CRC and size stand behind the data
_LONG = 0xFFFFFFFF  # as a size: it stands in the extra field
_CHUNK = 1 << 24
_STORAGES = {
    "ByteStorage": "u1", "UntypedStorage": "u1", "CharStorage": "i1", "ShortStorage": "i2",
    "IntStorage": "i4", "LongStorage": "i8", "HalfStorage": "f2", "FloatStorage": "f4",
    "DoubleStorage": "f8",
}  # fmt: skip
_DTYPES = {"uint16": "u2", "uint32": "u4", "uint64": "u8"}  # that have no storage of their own


class Rescued(NamedTuple):
    """The images of one part of a file that are there.

    Attributes:
        source: of them.
        images: the name of the array.
        num_declared: how many images should be there.
        offset: of the first byte of the first that is not; None where that is not known.
    """

    source: ArraySource
    images: str
    num_declared: int
    offset: int | None


def rescue(path: Path, kind: str) -> list[Rescued]:
    """The images of a damaged file that lie in it whole, with their labels.

    Args:
        path: the file.
        kind: 'npz', 'npy', 'hdf5' or 'pth'.

    Raises:
        InputError: there are none.
    """
    arrays = _OPEN[kind](path)
    found = []
    try:
        named = names_by_part(arrays)
    except ValueError as error:
        raise damaged(path, str(error)) from error
    for part, roles in named.items():
        if {"images", "labels"} <= roles.keys():
            found.append(_part(path, kind, part, arrays, roles))
    if not arrays:
        what = ", be it images or weights" if kind == "pth" else ""
        raise damaged(path, f"nothing in it can be read{what}")
    if not found:
        there = ", ".join(f"{name} {rows.shape}" for name, rows in arrays.items())
        raise damaged(path, f"no images with labels are left, only {there[:200]}")
    return found


class _First:
    """The first rows of an array."""

    def __init__(self, rows: Rows, count: int) -> None:
        self._rows, self.shape, self.dtype = rows, (count, *rows.shape[1:]), rows.dtype

    def read(self, start: int, stop: int) -> Array:
        return self._rows.read(start, stop)


def _part(
    path: Path, kind: str, part: str, arrays: Mapping[str, Rows], roles: Mapping[str, str]
) -> Rescued:
    images, labels = arrays[roles["images"]], arrays[roles["labels"]]
    trimmed = dict(arrays)
    if "offsets" in roles:
        offsets = arrays[roles["offsets"]]
        bounds = offsets.read(0, offsets.shape[0]).astype(np.int64).reshape(-1)
        declared, there = _declared(offsets) - 1, int((bounds <= images.shape[0]).sum()) - 1
    else:
        declared, there = _declared(images), images.shape[0]
    if _declared(labels) != declared:
        raise damaged(path, f"{declared} images and {_declared(labels)} labels")
    count, offset = min(there, labels.shape[0]), None
    if count < 1:
        raise damaged(path, f"{max(0, there)} images and {labels.shape[0]} labels are left")
    for name in [name for name in arrays if (role_of(name) or "  ")[1] == "classes"]:
        if _declared(arrays[name]) == declared:  # names of the images, as ArraySource has it
            del trimmed[name]
        elif arrays[name].shape[0] == count:  # it would take the names of the classes for such
            raise damaged(path, f"{name} may be names of classes or of the {count} images left")
    trimmed[roles["labels"]] = _First(labels, count)
    if "offsets" in roles:
        trimmed[roles["offsets"]], begins = _First(offsets, count + 1), int(bounds[count])
    else:
        trimmed[roles["images"]], begins = _First(images, count), count
    if isinstance(images, FileRows):
        offset = images.offset + begins * images.row_bytes
    source = ArraySource(path, kind, part, trimmed)
    return Rescued(source, roles["images"], declared, offset)


def _declared(rows: Rows) -> int:
    return rows.num_declared if isinstance(rows, FileRows) else rows.shape[0]


# ---------------------------------------------------------------- members of a zip file


class _Member(NamedTuple):
    start: int  # of its data
    end: int | None  # None where the file ends before, or where that is not known
    crc: int


def _members(data: mmap.mmap) -> Iterator[tuple[str, _Member]]:
    """The members that are not compressed, by their local headers, until one of those is damaged."""
    at = 0
    while at + _LOCAL.size <= len(data):
        magic, _, flags, method, _, _, crc, size, _, name, extra = _LOCAL.unpack_from(data, at)
        start = at + _LOCAL.size + name + extra
        if magic != b"PK\3\4" or method or start > len(data):
            return
        fields = data[at + _LOCAL.size : start]
        end: int | None
        if flags & _HAS_DESCRIPTOR:
            end, behind, crc = _described(data, start)
        else:
            end = behind = start + (_long_size(fields[name:]) if size == _LONG else size)
        member = _Member(start, end if end is None or end <= len(data) else None, crc)
        yield fields[:name].decode(errors="replace"), member
        if member.end is None:
            return
        at = behind


def _long_size(extra: bytes) -> int:
    """The size in the zip64 field of an extra field."""
    while len(extra) >= 12:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            return int(struct.unpack_from("<Q", extra, 4)[0])
        extra = extra[4 + length :]
    return 0


def _described(data: mmap.mmap, start: int) -> tuple[int | None, int, int]:
    """Where data end whose size stands behind them, where the next header is, and their CRC-32."""
    end = start
    while (end := data.find(_DESCRIPTOR, end)) >= 0:
        for form in ("<III", "<IQQ"):
            if end + 4 + struct.calcsize(form) <= len(data):
                crc, _, size = struct.unpack_from(form, data, end + 4)
                if size == end - start:
                    return end, end + 4 + struct.calcsize(form), crc
        end += 1
    return None, 0, 0


def _is_whole(data: mmap.mmap, member: _Member) -> bool:
    """Whether the bytes of a member are those that were written, as far as can be told."""
    assert member.end is not None
    crc = 0
    for at in range(member.start, member.end, _CHUNK):
        crc = zlib.crc32(data[at : min(at + _CHUNK, member.end)], crc)
    return member.crc in (0, crc)  # torch writes 0 where checksums are switched off


def _zip_arrays(
    path: Path, read: Callable[[Path, IO[bytes], dict[str, _Member]], dict[str, Rows]]
) -> dict[str, Rows]:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return {}
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            # Where the directory is there, a member without an end has lost bytes, who knows where.
            cut = not zipfile.is_zipfile(path)
            members = {
                name: member
                for name, member in _members(data)
                if (cut if member.end is None else _is_whole(data, member))
            }
        return read(path, file, members)


def _npz(path: Path, file: IO[bytes], members: dict[str, _Member]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for name, member in members.items():
        file.seek(member.start)
        with contextlib.suppress(InputError):  # of an array, the header is cut, or it is none
            shape, column_major, dtype = npy_header(file, path)
            if shape and not (column_major or dtype.hasobject):
                rows = FileRows(path, file.tell(), shape, dtype, cut=True)
                found[name.removesuffix(".npy")] = rows
    return found


def _pth(path: Path, file: IO[bytes], members: dict[str, _Member]) -> dict[str, Rows]:
    folder = next(iter(members), "").partition("/")[0]
    pickled, order = members.get(f"{folder}/data.pkl"), members.get(f"{folder}/byteorder")
    if pickled is None or order is None:
        return {}
    file.seek(order.start)
    if file.read(len(sys.byteorder)) != sys.byteorder.encode():
        return {}
    file.seek(pickled.start)
    try:
        saved = _Tensors(path, file, folder, members).load()
    except OSError:
        raise
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise damaged(path, f"its pickle: {type(error).__name__}, {error}"[:200]) from error
    return {name: value for name, value in leaves(saved, "") if isinstance(value, FileRows)}


class _Tensors(pickle.Unpickler):
    """Reads what torch.save pickled, with tensors as FileRows; nothing that the file names is called."""

    def __init__(
        self, path: Path, file: IO[bytes], folder: str, members: Mapping[str, _Member]
    ) -> None:
        super().__init__(file)
        self._file, self._size = file, path.stat().st_size
        self._path, self._folder, self._members = path, folder, members

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict  # of hooks; empty
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor
        if module in ("torch", "torch.storage") and name in {**_STORAGES, **_DTYPES}:
            return np.dtype({**_STORAGES, **_DTYPES}[name])
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _device, size = pid
        member = self._members.get(f"{self._folder}/data/{key}")
        if member is not None and member.end is None:
            # Behind it stands its checksum, or the file ends; else it is damaged, and who knows where.
            end = member.start + size * dtype.itemsize
            behind = read_at(self._file, end, max(0, min(len(_DESCRIPTOR), self._size - end)))
            member = member if _DESCRIPTOR.startswith(behind) else None
        return dtype, member

    def _tensor(
        self, storage: Any, offset: int, shape: Any, strides: Any, *rest: Any
    ) -> FileRows | None:
        dtype, member = storage
        dtype = next((value for value in rest if isinstance(value, np.dtype)), dtype)
        row_major = torch.empty(shape, device="meta").stride()
        if member is None or not shape or tuple(strides) != row_major:
            return None
        return FileRows(
            self._path, member.start + offset * dtype.itemsize, tuple(shape), dtype, cut=True
        )


_OPEN: Mapping[str, Callable[[Path], dict[str, Rows]]] = {
    "npy": lambda path: open_npy(path, cut=True),
    "npz": lambda path: _zip_arrays(path, _npz),
    "hdf5": lambda path: open_hdf5(path, cut=True),
    "pth": lambda path: _zip_arrays(path, _pth),
}
RESCUED = tuple(_OPEN)
