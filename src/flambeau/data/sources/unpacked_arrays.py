"""The arrays of a .npz: in memory, or if they are large in a file of the disk that has no name.

Pages of that file come into the memory when they are read, and leave it when others need the room, so that
the index of ten million images takes no gigabyte.
"""

import io
import math
import mmap
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

LARGE = 64 << 20
"""Bytes of arrays from which on they go to the disk."""

_MOST_PACKED = 100  # times; checksums, an eleventh of an index or more, cannot be compressed
_PIECE = 1 << 20
_ALIGNED = 64
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class UnpackedArrays:
    """The arrays of a .npz without objects.

    Args:
        scratch: folder for large ones; None, or without room: all in memory.

    Raises:
        ValueError, OSError, EOFError, zipfile.BadZipFile, MemoryError: no .npz, or damaged.
    """

    def __init__(self, data: bytes, scratch: Path | None) -> None:
        self._map: mmap.mmap | None = None
        size = _bytes_of(data)
        if size > max(LARGE, _MOST_PACKED * len(data)):
            raise ValueError("it would become too large")
        if scratch is not None and size >= LARGE:
            try:
                self.arrays = self._on_disk(data, scratch)
            except OSError:  # a full disk, or one that cannot be written
                self._map = None
            else:
                return
        with np.load(io.BytesIO(data), allow_pickle=False) as stored:
            self.arrays = {name: stored[name] for name in stored.files}

    def forget(self) -> None:
        """Free the memory of what has been read, until it is read again."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _on_disk(self, data: bytes, scratch: Path) -> dict[str, NDArray[Any]]:
        places: dict[str, tuple[int, tuple[int, ...], np.dtype[Any]]] = {}
        scratch.mkdir(parents=True, exist_ok=True)
        with (
            zipfile.ZipFile(io.BytesIO(data)) as archive,
            tempfile.TemporaryFile(dir=scratch) as file,
        ):
            for member in archive.infolist():
                with archive.open(member) as stream:
                    shape, dtype = _header(stream)
                    file.seek(-file.tell() % _ALIGNED, io.SEEK_CUR)
                    start = file.tell()
                    shutil.copyfileobj(stream, file, _PIECE)
                if file.tell() - start != math.prod(shape) * dtype.itemsize:
                    raise ValueError("an array is not as long as it says")
                places[member.filename.removesuffix(".npy")] = start, shape, dtype
            file.truncate(max(file.tell(), 1))  # an empty array may begin behind the end
            file.flush()
            # Copied on writing, so that the arrays may be given to torch; nobody writes.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return {
            name: np.frombuffer(self._map, dtype, math.prod(shape), start).reshape(shape)
            for name, (start, shape, dtype) in places.items()
        }


def _bytes_of(data: bytes) -> int:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return sum(member.file_size for member in archive.infolist())


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type of an array; its numbers follow in the stream."""
    reader = _HEADERS.get(np.lib.format.read_magic(stream))
    if reader is None:
        raise ValueError("an array of an unknown version")
    shape, in_columns, dtype = reader(stream)
    if dtype.hasobject or (in_columns and len(shape) > 1):
        raise ValueError("an array that is not read here")
    return shape, dtype
