"""RecordIO: many small files in one, each read at once by number or key (MXNet's .rec and .idx).

RecordIO：把许多小文件装进一个文件，按序号或键直接读取（MXNet 的 .rec 与 .idx）。

Source: dmlc-core `include/dmlc/recordio.h` and mxnet 1.9.1 `python/mxnet/recordio.py`.
A file is a run of parts: magic u32, word u32 = flag << 29 | length, data, zeros up to a multiple of
4; all little-endian. Where a payload holds the magic at a multiple of 4, it is cut there and those
4 bytes are left out; so a record is one part (flag 0), or a first (1), middle (2) and a last (3).

Not for records of 512 MiB and more, for appending, or where damage inside a payload must be found:
the format has no checksum (TFRecord has).
"""

import contextlib
import itertools
import numbers
import operator
import os
import re
import secrets
import struct
import threading
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, SupportsIndex

import torch

BytesLike = bytes | bytearray | memoryview  # and whatever else memoryview() takes
StrPath = str | os.PathLike[str]

_MAGIC = b"\x0a\x23\xd7\xce"
_PART = struct.Struct("<4sI")
_IMAGE = struct.Struct("<IfQQ")
_MAX_LENGTH = (1 << 29) - 1
_MAX_EXTENT = 2 * _MAX_LENGTH + 8  # on disk: a payload of nothing but magics doubles
_INDEX_LINE = re.compile(rb"(-?\d{1,19})\s+(\d{1,19})\s*")


class RecordError(ValueError):
    """A damaged file; the message names the file, the byte offset and what is wrong there."""


class RecordReader:
    """The records of a .rec file, in file order; safe in threads, after fork and after pickle.

    Opening checks the index, and that the last record ends where the file ends; other headers are
    checked when read. Without an index, opening walks the file and checks all headers.

    Args:
        path: the .rec file.
        index_path: its index; by default the file beside it that ends in .idx, if there is one.

    Raises:
        RecordError: a damaged file or index, at opening or at reading.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with RecordWriter(f"{folder}/words.rec") as writer:
        ...         offsets = [writer.write(b"one", key=7), writer.write(b"two", key=3)]
        ...     with RecordReader(f"{folder}/words.rec") as reader:
        ...         len(reader), reader[0], reader[-1], reader.get(7), reader.keys, offsets
        (2, b'one', b'two', b'one', (7, 3), [0, 12])
    """

    def __init__(self, path: StrPath, index_path: StrPath | None = None) -> None:
        self.path = Path(path).absolute()
        beside = self.path.with_suffix(".idx")
        if index_path is None and beside.is_file():
            index_path = beside
        self._open()
        self._indexed = index_path is not None
        if index_path is not None:
            entries = self._read_index(Path(index_path))
            self.keys: Sequence[int] = tuple(entries)
            self._offsets = array("Q", entries.values())
        else:
            self._offsets = array("Q", self._walk(0))
            self.keys = range(len(self._offsets))
        count = range(len(self.keys))
        # Keys that count from 0, the usual ones, are their own positions: no dict of millions.
        in_order = tuple(self.keys) == tuple(count)
        self._positions = count if in_order else dict(zip(self.keys, count, strict=True))

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: SupportsIndex) -> bytes:
        if isinstance(index, slice):
            raise TypeError("a RecordReader takes one integer, not a slice; read record by record")
        position = range(len(self))[operator.index(index)]  # IndexError, negative numbers
        start = self._offsets[position]
        end = self._offsets[position + 1] if position + 1 < len(self) else self._size
        data = self._read(start, end)
        at, last, pieces = 0, False, []
        while not last:
            length, last = self._check_part(data[at : at + 8], start + at, start, end)
            body, at = at + 8, at + 8 + length + -length % 4
            pieces.append(data[body : body + length])
            if any(data[body + length : at]):
                raise self._error(start + body + length, "the padding is not zero")
        if start + at != end:
            raise self._error(start + at, f"the record ends here, the index says at {end}")
        # A wrong length can end on a later header; not so where an index proves the end of a single
        # part, which saves this search (0.5 ms a MB).
        unproven = pieces if len(pieces) > 1 or not self._indexed else []
        if any(True for piece in unproven for _ in _aligned_magics(piece)):
            raise self._error(start, "a part runs over the start of another: wrong length")
        return _MAGIC.join(pieces)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def get(self, key: SupportsIndex) -> bytes:
        """The record of a key of the index; KeyError where there is none."""
        if operator.index(key) not in self._positions:
            raise KeyError(f"{self.path} has no record with key {key}")
        return self[self._positions[operator.index(key)]]

    def close(self) -> None:
        """Close the file; reading afterwards is a ValueError."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_file", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
        if self._size != state["_size"]:
            raise self._error(self._size, f"the file ends here, it had {state['_size']} bytes")

    def _open(self) -> None:
        self._file = self.path.open("rb", buffering=0)
        weakref.finalize(self, self._file.close)  # a data set is rarely closed by hand
        self._size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    def _read(self, start: int, end: int) -> bytes:
        if hasattr(os, "pread"):
            data = os.pread(self._file.fileno(), end - start, start)
        else:
            with self._lock:  # Windows, which has no fork that could copy a held lock
                self._file.seek(start)
                data = self._file.read(end - start)
        if len(data) < end - start:
            raise self._error(start + len(data), "the file ends here, it was longer when opened")
        return data

    def _error(self, offset: int, reason: str) -> RecordError:
        return RecordError(f"{self.path}, byte {offset}: {reason}")

    def _check_part(self, header: bytes, at: int, start: int, end: int) -> tuple[int, bool]:
        """Length of the part at `at` of the record from `start` to at most `end`; is it the last?"""
        if len(header) < 8:
            reason = f"truncated, {len(header)} of 8 header bytes in the record from byte {start}"
            raise self._error(at, reason)
        magic, word = _PART.unpack(header)
        flag, length = word >> 29, word & _MAX_LENGTH
        if magic != _MAGIC:
            raise self._error(at, f"wrong magic {magic.hex()}, not {_MAGIC.hex()}: no record here")
        if flag not in ((0, 1) if at == start else (2, 3)):
            raise self._error(at, f"flag {flag} in a record that starts at byte {start}")
        if at + 8 + length + -length % 4 > end:
            raise self._error(at, f"truncated: {length} bytes and padding end after {end}")
        if flag in (1, 2) and length % 4:
            raise self._error(at, f"a part before the last has {length} bytes, not 4 x n")
        return length, flag in (0, 3)

    def _walk(self, at: int) -> Iterator[int]:
        while at < self._size:
            start, last = at, False
            yield start
            while not last:
                header = self._read(at, min(at + 8, self._size))
                length, last = self._check_part(header, at, start, self._size)
                at += 8 + length + -length % 4

    def _read_index(self, path: Path) -> dict[int, int]:
        entries: dict[int, int] = {}
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            match = _INDEX_LINE.fullmatch(line)
            if match is None:
                raise RecordError(f"{path}, line {number}: not 'key<TAB>offset': {line[:40]!r}")
            key, offset = map(int, match.groups())
            if key in entries:
                raise RecordError(f"{path}, line {number}: key {key} is there twice")
            if offset % 4 or offset + 8 > self._size:
                raise self._error(offset, f"no record can start here: {path}, line {number}")
            entries[key] = offset
        entries = dict(sorted(entries.items(), key=operator.itemgetter(1)))
        edges = [*entries.values(), self._size]
        blame = f"{path} does not fit this file; remove it to have the file walked"
        if edges[0] != 0:
            raise self._error(0, f"no key for the record here: {blame}")
        for start, end in itertools.pairwise(edges):
            if not 8 <= end - start <= _MAX_EXTENT:
                raise self._error(start, f"no record is {end - start} bytes long: {blame}")
        for extra in itertools.islice(self._walk(max(entries.values(), default=0)), 1, 2):
            raise self._error(extra, f"no key for the record here: {blame}")
        return entries


class RecordWriter:
    """Writes a .rec file and its index, which get their names only when all is written.

    Use it in a `with` block: an exception in it leaves nothing, a kill only files that end in .tmp.

    Args:
        path: the .rec file to make.
        index_path: the index to make; by default beside it, ending in .idx.
        index: False to write no index.

    Raises:
        FileExistsError: one of the files exists.
        ValueError: index_path contradicts index=False, or is the .rec file itself.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, RecordWriter(f"{folder}/a.rec") as writer:
        ...     [writer.write(b"first"), writer.write(b"second", key=70)]  # offsets
        [0, 16]
    """

    def __init__(
        self, path: StrPath, index_path: StrPath | None = None, *, index: bool = True
    ) -> None:
        if index_path is not None and not index:
            raise ValueError(f"index=False contradicts index_path={os.fspath(index_path)!r}")
        self._rec = Path(path).absolute()
        self._idx = Path(index_path or self._rec.with_suffix(".idx")).absolute() if index else None
        if self._idx == self._rec:
            raise ValueError(f"records and index cannot both be {self._rec}: name a .rec file")
        self._refuse_existing()
        self._suffix = f".{secrets.token_hex(4)}.tmp"
        self._file = self._temporary(self._rec).open("xb")
        self._size = 0
        self._offsets: dict[int, int] = {}

    def write(self, payload: BytesLike, key: SupportsIndex | None = None) -> int:
        """Append a record and return its offset in bytes.

        Args:
            payload: bytes-like, less than 2**29 bytes.
            key: its key in the index, a 64-bit integer; by default the number of records before it.

        Raises:
            TypeError: text, or another object without bytes.
            ValueError: payload too long; key taken or out of range; a key but index=False.
        """
        data = _as_bytes(payload)
        if len(data) > _MAX_LENGTH:
            raise ValueError(f"a record has at most {_MAX_LENGTH} bytes, got {len(data)}; split it")
        if key is not None and self._idx is None:
            raise ValueError(f"key {key} has no place: the writer was made with index=False")
        key = len(self._offsets) if key is None else operator.index(key)
        if key in self._offsets or not -(1 << 63) <= key < 1 << 63:
            raise ValueError(f"a key is a 64-bit integer that is not taken yet, got {key}")
        self._file.writelines(_encode(data))
        self._offsets[key], self._size = self._size, self._file.tell()
        return self._offsets[key]

    def close(self) -> None:
        """Finish the files and give them their names; a second call does nothing."""
        if self._file.closed:
            return
        try:
            if self._file.tell() != self._size:
                raise OSError(f"{self._rec}: an earlier write stopped inside a record")
            self._sync(self._file)
            if self._idx is not None:
                with self._temporary(self._idx).open("xb") as index:
                    index.writelines(b"%d\t%d\n" % entry for entry in self._offsets.items())
                    self._sync(index)
            self._refuse_existing()
            for target in self._targets():
                self._temporary(target).rename(target)
        except BaseException:
            self._discard()
            raise
