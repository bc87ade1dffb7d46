"""RecordIO: many small files in one, each read directly by number or key (MXNet's .rec and .idx).

RecordIO：把许多小文件装进一个文件，按序号或键直接读取（MXNet 的 .rec 与 .idx）。

Source: dmlc-core `include/dmlc/recordio.h` and mxnet 1.9.1 `python/mxnet/recordio.py`.
A file is a sequence of parts: magic u32, word u32 = flag << 29 | length, data, zeros up to a multiple
of 4; all little-endian. If a payload holds the magic at a multiple of 4, it is split there and those
4 bytes are left out. So a record is one part (flag 0), or a first (1), middle (2) and a last part (3).

Not for records of 512 MiB and more, for appending, or where damage inside a payload must be detected:
the format has no checksum (TFRecord has).
"""

import contextlib
import functools
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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, SupportsIndex

import torch

BytesLike = bytes | bytearray | memoryview  # and other types that memoryview() takes
StrPath = str | os.PathLike[str]
_Read = Callable[[int, int], bytes]  # (start, end) to the bytes between them

_MAGIC = b"\x0a\x23\xd7\xce"
_PART = struct.Struct("<4sI")
_IMAGE = struct.Struct("<IfQQ")
_MAX_LENGTH = (1 << 29) - 1
_MAX_EXTENT = 2 * _MAX_LENGTH + 8  # on disk: a payload of only magics doubles in size
_INDEX_LINE = re.compile(rb"(-?\d{1,19})\s+(\d{1,19})\s*")


class RecordError(ValueError):
    """The file is damaged; the message names the file, the byte offset and what is wrong there."""


class RecordReader:
    """The records of a .rec file, in file order; safe in threads, after fork and after pickle.

    Opening checks the index and the end of the file, or without an index reads all headers; other headers are
    checked when they are read.

    Args:
        index_path: by default the .idx file beside it, if there is one.

    Raises:
        RecordError: at opening or reading: file or index damaged.

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
        if index_path is None and self.path.with_suffix(".idx").is_file():
            index_path = self.path.with_suffix(".idx")
        self._open()
        self._indexed = index_path is not None
        if index_path is None:
            self._offsets = array("Q", self._walk(0))
            self.keys: Sequence[int] = range(len(self._offsets))
        else:
            entries = self._read_index(Path(index_path))
            self._offsets = array("Q", entries.values())
            self.keys = tuple(entries)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: SupportsIndex) -> bytes:
        if isinstance(index, slice):
            raise TypeError("a RecordReader takes one integer, not a slice; read record by record")
        number = range(len(self))[operator.index(index)]  # IndexError, negative numbers
        start = self._offsets[number]
        end = self._offsets[number + 1] if number + 1 < len(self) else self._size
        data = self._read(start, end)
        position = start
        pieces = []
        for body, length in self._parts(start, end, lambda a, b: data[a - start : b - start]):
            position = body + length + -length % 4
            pieces.append(data[body - start : body - start + length])
            if any(data[body - start + length : position - start]):
                raise self._error(body + length, "the padding is not zero")
        if position != end:
            raise self._error(position, f"the record ends here, the index says at {end}")
        # A wrong length may end at a later header, but not for a single part whose end the index
        # confirms; skipping that case saves this search (0.5 ms per MB).
        unproven = pieces if len(pieces) > 1 or not self._indexed else []
        if any(True for piece in unproven for _ in _aligned_magics(piece)):
            raise self._error(start, "a part runs over the start of another: wrong length")
        return _MAGIC.join(pieces)

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

    def get(self, key: SupportsIndex) -> bytes:
        """The record with a key of the index; KeyError if there is none."""
        if operator.index(key) not in self._positions:
            raise KeyError(f"{self.path} has no record with key {key}")
        return self[self._positions[operator.index(key)]]

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {key: number for number, key in enumerate(self.keys)}

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
        weakref.finalize(self, self._file.close)  # data sets are rarely closed explicitly
        self._size = os.fstat(self._file.fileno()).st_size
        self._lock = threading.Lock()

    def _read(self, start: int, end: int) -> bytes:
        if hasattr(os, "pread"):
            data = os.pread(self._file.fileno(), end - start, start)
        else:
            with self._lock:  # Windows, where no fork can copy a held lock
                self._file.seek(start)
                data = self._file.read(end - start)
        if len(data) < end - start:
            raise self._error(start + len(data), "the file ends here, it was longer when opened")
        return data

    def _error(self, offset: int, reason: str) -> RecordError:
        return RecordError(f"{self.path}, byte {offset}: {reason}")

    def _parts(self, start: int, end: int, read: _Read) -> Iterator[tuple[int, int]]:
        """Offset and length of the data of each part of the record at `start`, checked."""
        position = start
        flag = 1
        while flag in (1, 2):
            header = read(position, min(position + 8, end))
            if len(header) < 8:
                raise self._error(position, f"truncated header of the record from byte {start}")
            magic, word = _PART.unpack(header)
            flag = word >> 29
            length = word & _MAX_LENGTH
            if magic != _MAGIC:
                raise self._error(
                    position, f"wrong magic {magic.hex()}: no record or part starts here"
                )
            if flag not in ((0, 1) if position == start else (2, 3)):
                raise self._error(position, f"flag {flag} in a record that starts at byte {start}")
            if position + 8 + length + -length % 4 > end:
                raise self._error(
                    position, f"truncated: {length} bytes and padding end after {end}"
                )
            if flag in (1, 2) and length % 4:
                raise self._error(position, f"a part before the last has {length} bytes, not 4 x n")
            yield position + 8, length
            position += 8 + length + -length % 4

    def _walk(self, position: int) -> Iterator[int]:
        while position < self._size:
            yield position
            *_, (body, length) = self._parts(position, self._size, self._read)
            position = body + length + -length % 4

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
    """Writes a .rec file and its index, which get their names only when both are complete.

    In a `with` block an exception leaves no file, a kill only .tmp files.

    Args:
        index_path: by default the .idx file beside it; False for none.

    Raises:
        FileExistsError: one of the files exists.
        ValueError: index_path is the .rec file itself.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, RecordWriter(f"{folder}/a.rec") as writer:
        ...     [writer.write(b"first"), writer.write(b"second", key=70)]  # offsets
        [0, 16]
    """

    def __init__(self, path: StrPath, index_path: StrPath | Literal[False] | None = None) -> None:
        self._rec = Path(path).absolute()
        index_path = self._rec.with_suffix(".idx") if index_path is None else index_path
        self._idx = None if index_path is False else Path(index_path).absolute()
        if self._idx == self._rec:
            raise ValueError(f"records and index cannot both be {self._rec}: name a .rec file")
        suffix = f".{secrets.token_hex(4)}.tmp"
        # The index gets its name first: alone it is harmless, but a .rec alone would lack its keys.
        targets = [target for target in (self._idx, self._rec) if target is not None]
        self._temporary = {target: target.with_name(target.name + suffix) for target in targets}
        self._refuse_existing()
        self._file = self._temporary[self._rec].open("xb")
        self._size = 0
        self._offsets: dict[int, int] = {}

    def write(self, payload: BytesLike, key: SupportsIndex | None = None) -> int:
        """Append a record and return its offset in bytes.

        Args:
            payload: bytes-like, less than 2**29 bytes.
            key: in the index, a 64-bit integer; by default the number of records before it.

        Raises:
            TypeError: the payload is not bytes-like.
            ValueError: payload too long; key taken or out of range, or no index.
        """
        data = _as_bytes(payload)
        if len(data) > _MAX_LENGTH:
            raise ValueError(f"a record has at most {_MAX_LENGTH} bytes, got {len(data)}; split it")
        if key is not None and self._idx is None:
            raise ValueError(f"key {key} cannot be kept: the writer was made without an index")
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
            self._file.close()
            if self._idx is not None:
                lines = [b"%d\t%d\n" % entry for entry in self._offsets.items()]
                self._temporary[self._idx].write_bytes(b"".join(lines))
            for temporary in self._temporary.values():
                with temporary.open("rb+") as file:
                    os.fsync(
                        file.fileno()
                    )  # else a power cut could leave the name without its bytes
            self._refuse_existing()
            for target, temporary in self._temporary.items():
                temporary.rename(target)
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._discard()

    def _refuse_existing(self) -> None:
        for target in self._temporary:
            if target.exists():
                raise FileExistsError(f"{target} exists: remove it or choose another name")

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk the last flush fails
            self._file.close()
        for temporary in self._temporary.values():
            temporary.unlink(missing_ok=True)


class IRHeader(NamedTuple):
    """The header of an image record."""

    flag: int  # number of labels after the header, 0 if the label is in it; set by `pack`
    label: Any  # a number, or a list, array or tensor of numbers; float32 in the file
    id: int  # first image number, an unsigned 64-bit integer
    id2: int  # second image number, 0 by custom


def pack(header: IRHeader, payload: BytesLike) -> bytes:
    """Make an image record: 24 bytes of header, a vector of labels if any, the bytes of an image file.

    Args:
        header: its flag is ignored. A list, array or tensor (0-d too) as label is written as a vector in
            row-major order, an empty one as 0.
        payload: bytes-like, usually a JPEG or PNG file.

    Raises:
        TypeError: the label is no number or rectangular array of numbers, or the payload no bytes.
        ValueError: a class number that float32 would round (above 2**24), a label beyond float32,
            or an id outside 0 .. 2**64 - 1.

    Example:
        >>> unpack(pack(IRHeader(0, 3, 2574, 0), b"image"))
        (IRHeader(flag=0, label=3.0, id=2574, id2=0), b'image')
    """
    _, label, *ids = header
    if isinstance(label, numbers.Integral) and abs(int(label)) > 1 << 24:
        raise ValueError(f"label {label} would be rounded: float32 counts up to 2**24 only")
    plain = label.tolist() if hasattr(label, "tolist") else label
    try:
        labels = torch.tensor(plain, dtype=torch.float64, device="cpu").flatten().tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"a label is a number or an array of numbers, got {label!r}") from error
    if isinstance(label, numbers.Number) or not labels:
        flag, scalar, labels = 0, sum(labels), []
    else:
        flag = len(labels)
        scalar = 0.0
    try:
        head = _IMAGE.pack(flag, scalar, *map(operator.index, ids))
        return head + struct.pack(f"<{flag}f", *labels) + _as_bytes(payload)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"labels must fit float32, ids 0 .. 2**64 - 1; got {header}") from error


def unpack(record: BytesLike) -> tuple[IRHeader, bytes]:
    """Split an image record into header and payload.

    Returns:
        The header, whose label is a float, or if flag > 0 a (flag,) float32 CPU tensor; and the payload.

    Raises:
        RecordError: the record is shorter than its header and labels.

    Example:
        >>> unpack(pack(IRHeader(0, [0.5, 2], 1, 0), b"image"))[0].label
        tensor([0.5000, 2.0000])
    """
    data = _as_bytes(record)
    if len(data) < _IMAGE.size:
        raise RecordError(f"an image record has at least {_IMAGE.size} bytes, got {len(data)}")
    flag, label, *ids = _IMAGE.unpack_from(data)
    end = _IMAGE.size + 4 * flag
    if len(data) < end:
        raise RecordError(f"flag {flag} asks for {end} bytes of labels, got {len(data)} in all")
    if flag:
        vector = struct.unpack_from(f"<{flag}f", data, _IMAGE.size)
        label = torch.tensor(vector, dtype=torch.float32, device="cpu")
    return IRHeader(flag, label, *ids), data[end:]


def _aligned_magics(data: bytes) -> Iterator[int]:
    position = data.find(_MAGIC)
    while position >= 0:
        if position % 4 == 0:
            yield position
        position = data.find(_MAGIC, position + 1)


def _encode(data: bytes) -> Iterator[bytes]:
    done = 0
    for position in _aligned_magics(data):
        yield _PART.pack(_MAGIC, (2 if done else 1) << 29 | position - done) + data[done:position]
        done = position + 4
    yield _PART.pack(_MAGIC, (3 if done else 0) << 29 | len(data) - done)
    yield data[done:] + bytes(-len(data) % 4)


def _as_bytes(data: BytesLike) -> bytes:
    try:
        return data if isinstance(data, bytes) else memoryview(data).tobytes()
    except TypeError as error:
        kind = type(data).__name__
        raise TypeError(f"a record is bytes, got {kind}; for text: text.encode()") from error
