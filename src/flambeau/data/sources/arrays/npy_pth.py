"""Arrays in .npy, .npz and .pth files, read row by row by offset.

Source: numpy.lib.format (NEP 1); PyTorch's notes on serialization semantics.

Arrays are read by position (pread), not through a memory map: with a map, a file that is truncated while in
use, or a network drive that fails, kills the process (SIGBUS) instead of raising OSError. pread costs 1.4
microseconds more per image, and uses the page cache as well.
"""

import math
import os
import pickle
import weakref
import zipfile
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.arrays.array_roles import labels_beside, role_of
from flambeau.errors import ZIP_ERRORS, DamagedData, InputError
from flambeau.images.stand_ins import stand_in_at
from flambeau.recipes.data.mapped_arrays import Header, npy_header, npz_members
from flambeau.recipes.setup.environment import usable_memory

Array = NDArray[Any]


class Rows(Protocol):
    """An array whose rows are read on demand; safe in threads and after a fork."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, start: int, stop: int) -> Array:
        """Rows start .. stop - 1; OSError if they cannot be read."""


class MemoryRows:
    """An array in memory."""

    def __init__(self, array: Array) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype

    def read(self, start: int, stop: int) -> Array:
        return self._array[start:stop]


class FileRows:
    """An array stored in a file as in memory, in row-major order, from byte `offset` on."""

    def __init__(
        self, path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        self.shape, self.dtype, self._offset = shape, dtype, offset
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._file = open_with_owner(self, path)
        size = os.fstat(self._file.fileno()).st_size
        end = offset + shape[0] * self._row_bytes
        if end > size:
            raise damaged(path, f"an array ends at byte {end}, the file at {size}")

    def read(self, start: int, stop: int) -> Array:
        at = self._offset + start * self._row_bytes
        length = (stop - start) * self._row_bytes
        data = read_at(self._file, at, length)
        return np.frombuffer(data, self.dtype).reshape(stop - start, *self.shape[1:])


class LoadedRows:
    """An array that cannot be read by offset: read whole at the first access, and kept."""

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], load: Callable[[], Array]
    ) -> None:
        self._path, self.shape, self.dtype, self._load = path, shape, dtype, load

    def read(self, start: int, stop: int) -> Array:
        return self._array[start:stop]

    @cached_property
    def _array(self) -> Array:
        size = math.prod(self.shape) * self.dtype.itemsize
        memory = usable_memory()
        if memory is not None and size > memory:
            raise InputError(
                f"{self._path}: a compressed or column-major array takes {size / 2**30:.1f} GiB of "
                f"memory; there are {memory / 2**30:.1f}\n"
                "Save it with np.save or np.savez, in row-major order, to have it read in place"
            )
        try:
            array = self._load()
            array.flags.writeable = False  # images are views of it
            return array
        except ZIP_ERRORS as error:
            raise damaged(self._path, str(error)) from error


class MappedRows:
    """An array that torch has mapped from a file; rows are copied out of the map."""

    def __init__(self, path: Path, array: Array) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self._file = open_with_owner(self, path)
        self._size = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, stop: int) -> Array:
        size = os.fstat(self._file.fileno()).st_size
        if size < self._size:  # touching a page beyond the end would kill the process
            raise OSError(f"the file ends at byte {size}, it was longer when opened")
        rows = self._array[start:stop].copy()
        if rows.dtype.hasobject:  # references were copied, not their targets
            for number, item in enumerate(rows):
                rows[number] = item.copy()
        return rows


class RefusedRows:
    """An array that exists but cannot be read; reading it raises the reason."""

    def __init__(self, shape: tuple[int, ...], reason: str | InputError) -> None:
        self.shape = shape
        self.dtype = np.dtype(object)
        self._reason = reason

    def read(self, start: int, stop: int) -> Array:
        raise InputError(self._reason) if isinstance(self._reason, str) else self._reason


def open_with_owner(owner: object, path: Path) -> IO[bytes]:
    """A file for `read_at`, closed when its owner is freed."""
    file = path.open("rb", buffering=0)
    weakref.finalize(owner, file.close)
    return file


def read_at(file: IO[bytes], start: int, length: int) -> bytes:
    """Bytes of a file, whatever other threads read from it; OSError if it ends before them."""
    pieces = []
    at = start
    end = start + length
    while at < end:
        if hasattr(os, "pread"):
            piece = os.pread(file.fileno(), end - at, at)
        else:  # Windows: other threads would share the file's position
            with Path(file.name).open("rb") as reopened:
                reopened.seek(at)
                piece = reopened.read(end - at)
        if not piece:
            size = os.fstat(file.fileno()).st_size
            raise OSError(f"the file ends at byte {size}, it was longer when opened")
        pieces.append(piece)  # Linux returns at most 2 GiB at once
        at += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def damaged(path: Path, how: str) -> InputError:
    other = stand_in_at(path)  # also for a file of labels
    if other is not None:
        return InputError(f"{path} is {other}")
    return DamagedData(f"{path} is damaged or cut short: {how}\nCopy or make it again")


def absent_chunks(name: str, lost: int, count: int) -> str:
    """A sentence on an array with absent chunks."""
    parts = f"{lost} of {count} chunks" if count > 1 else "all"
    verb = "are" if lost > 1 else "is"
    return f"{parts} of {name} {verb} absent, never written or lost, and read as the fill value"


def open_npy(path: Path, *, labelled: bool = True) -> dict[str, Rows]:
    """Images in an .npy file, and their labels in the first of these files beside it.

    NAME_labels.npy, NAME.labels.npy, NAME with y, labels, label, targets or target for x, images, image, imgs
    or data (y_train.npy beside x_train.npy), labels.npy, y.npy; each also as .txt, one label per line.
    """
    images = _npy_rows(path)
    if isinstance(images, RefusedRows):
        images.read(0, 1)  # raises the reason
    if len(images.shape) < 3 and images.dtype.kind not in "SVO":
        raise InputError(
            f"{path} has shape {images.shape}, which is no array of images\n"
            "Name the file that holds them, of shape (N, H, W) or (N, H, W, C)"
        )
    if not labelled:
        return {"images": images}
    beside = [path.with_name(name + end) for name in labels_beside(path.stem) for end in _ENDS]
    for candidate in beside:
        if candidate != path and candidate.is_file():
            is_text = candidate.suffix == ".txt"
            labels = _text_labels(candidate) if is_text else _npy_rows(candidate)
            return {"images": images, "labels": labels}
    likely = " or ".join(dict.fromkeys([beside[0].name, f"{path.stem}.labels.txt", beside[4].name]))
    raise InputError(f"{path} has no labels beside it\nExpected {likely}, one label per image")


_ENDS = (".npy", ".txt")


def open_npz(path: Path) -> dict[str, Rows]:
    """The arrays of an .npz file by name; uncompressed ones are read by offset."""
    try:
        return {
            info.filename.removesuffix(".npy"): _array_rows(path, header, start, info)
            for info, header, start in npz_members(path)
        }
    except InputError:
        raise
    except ValueError as error:
        raise damaged(path, str(error).removeprefix(f"{path}: ")) from error


def open_pth(path: Path) -> dict[str, Rows]:
    """The tensors of a file of torch.save by name, mapped, not read.

    It holds a dict (or dicts of the parts), a tuple (images, labels) or (images, labels, classes), or a list
    of pairs (image, label).
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":
            raise InputError(
                f"{path} is not a zip file: it is damaged, or was saved before PyTorch 1.6\n"
                "Load it and save it again with torch.save"
            )
    if not zipfile.is_zipfile(path):  # torch calls it an invalid argument
        raise damaged(path, "the directory at its end is missing")
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path} holds Python objects that are no tensors, such as a whole model, or is damaged\n"
            "Save tensors alone: torch.save({'images': images, 'labels': labels}, PATH)"
        ) from error
    except OSError:
        raise
    except Exception as error:
        # torch has no common exception for damage: RuntimeError, KeyError, ValueError and many more.
        if "annot allocate memory" in str(error):
            raise InputError(
                f"{path} is larger than the memory, and torch maps no such file\n"
                "Save it in parts, several .pth files in one folder"
            ) from error
        raise damaged(path, " ".join(str(error).split())[:200]) from error
    return {name: _tensor_rows(path, value) for name, value in _leaves(saved, "")}


def _npy_rows(path: Path) -> Rows:
    try:
        with path.open("rb") as file:
            header = npy_header(file, "its header")
    except ValueError as error:
        raise damaged(path, str(error)) from error
    return _array_rows(path, header, 0, None)


def _array_rows(
    path: Path, header: Header, start: int | None, info: zipfile.ZipInfo | None
) -> Rows:
    """Rows read by offset, from byte `start` on, if the array is stored so; else loaded when needed."""
    descr, column_major, shape, size = header
    try:
        dtype = np.dtype(descr)
    except (TypeError, ValueError, SyntaxError) as error:
        raise InputError(
            f"{path} holds records, or values of a type that NumPy lacks: {descr:.60}\n"
            "Save numbers or text: np.asarray(values)"
        ) from error
    if dtype.hasobject:
        where = f"{path}: {info.filename}" if info else f"{path}"
        reason = "holds pickled Python objects, which are never loaded"
        advice = "Save numbers or text: np.asarray(values), without dtype=object"
        return RefusedRows(shape, f"{where} {reason}\n{advice}")
    if info and size + math.prod(shape) * dtype.itemsize != info.file_size:
        raise damaged(path, f"{info.filename} has not the {info.file_size} bytes of its header")
    if start is None or column_major or not shape:
        member = info.filename if info else None
        return LoadedRows(path, shape, dtype, partial(_load, path, member))
    return FileRows(path, start + size, shape, dtype)


def _load(path: Path, member: str | None) -> Array:
    """The array of an .npy file, or of a member of an .npz."""
    with path.open("rb") as file:  # np.load itself leaves a damaged one open
        loaded: Any = np.load(file, allow_pickle=False)
        array: Array = loaded if member is None else loaded[member]
        return array


def _text_labels(path: Path) -> Rows:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
    words = [line.strip() for line in lines]
    if all(word.isdecimal() and word.isascii() for word in words):
        return MemoryRows(np.array([int(word) for word in words]))
    return MemoryRows(np.array(words))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The arrays, and lists of images or labels, in a result of torch.load."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(value, list | tuple) and role_of(name) is None:
        if value and all(_is_pair(item) for item in value):
            value = tuple(map(list, zip(*value, strict=True)))
        if len(value) in (2, 3):
            prefix = f"{name}/" if name else ""
            for role, inner in zip(("images", "labels", "classes"), value, strict=False):
                yield prefix + role, inner
    else:
        yield name or "images", value


def _is_pair(value: Any) -> bool:
    """Whether it is an image and its label."""
    return (
        isinstance(value, list | tuple)
        and len(value) == 2
        and isinstance(value[0], Tensor)
        and (
            isinstance(value[1], int | str) or (isinstance(value[1], Tensor) and value[1].ndim == 0)
        )
    )


def _tensor_rows(path: Path, value: Any) -> Rows:
    if isinstance(value, Tensor):
        try:
            return MappedRows(path, value.detach().numpy())
        except (TypeError, RuntimeError) as error:  # bfloat16, sparse, quantised
            reason = f"{path} has a tensor {value.dtype}: {error}\nSave tensors of uint8 and int64"
            return RefusedRows(tuple(value.shape), reason)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(item, Tensor) and item.ndim for item in value):
            array = np.empty(len(value), object)
            for number, item in enumerate(value):
                array[number] = item.detach().numpy()
            return MappedRows(path, array)
        plain = [item.item() if isinstance(item, Tensor) else item for item in value]
        if len({type(item) for item in plain}) == 1 and isinstance(plain[0], int | float | str):
            return MemoryRows(np.array(plain))
    return RefusedRows((), f"{path} has {_kind(value)} where tensors are expected")


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
