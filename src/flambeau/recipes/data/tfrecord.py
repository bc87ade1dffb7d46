"""TFRecord: many small records with checksums in one file, each read directly by number.

TFRecord：把许多小记录装进一个文件，每条都有校验和，按序号直接读取。

Source: TensorFlow `record_writer.cc` and `record_reader.cc`; CRC32C: RFC 3720, appendix B.4.
A file is a sequence of records: length u64, masked CRC of the length u32, data, masked CRC of the data u32;
all little-endian, without padding, file header or index.
A record usually holds a tf.train.Example: see tf_example.py.

Not for compressed files (GZIP, ZLIB: no random access) and not for appending.
"""

import contextlib
import functools
import importlib
import itertools
import operator
import os
import secrets
import struct
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self, SupportsIndex

BytesLike = bytes | bytearray | memoryview  # and other types that memoryview() takes
StrPath = str | os.PathLike[str]

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_OVERHEAD = _HEADER.size + _FOOTER.size
_COMPRESSED = {b"\x1f\x8b": "GZIP", b"\x78\x9c": "ZLIB", b"\x78\x01": "ZLIB", b"\x78\xda": "ZLIB"}

_REVERSED = 0x82F63B78  # the polynomial of CRC32C, first bit lowest
# Exponents of multiples of the polynomial with few terms, found by search. Because f(x)**2 = f(x**2) over
# GF(2), doubling all exponents gives another multiple, so there is one for every size of data.
_SPARSE = ((6777, 484, 100, 0), (563, 109, 58, 53, 31, 0))
_CHUNK = 1 << 16  # bytes; larger integers lose up to half of the speed to memory allocation


class TFRecordError(ValueError):
    """The file is damaged; the message names the file, the byte offset and what is wrong there."""


class TFRecordReader:
    """The records of a TFRecord file, in file order; safe in threads, after fork and after pickle.

    Opening checks every length by its checksum, about 2 us per record; with `offsets` only these and the last
    length. Reading a record checks both of its checksums.

    Args:
        offsets: where records start, in bytes: `offsets` of an earlier reader.

    Attributes:
        offsets: (N,) unsigned 64-bit, for numpy.asarray without a copy.

    Raises:
        TFRecordError: at opening or reading: damaged, or `offsets` do not fit.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with TFRecordWriter(f"{folder}/words.tfrecord") as writer:
        ...         _ = writer.write(b"one"), writer.write(b"three")
        ...     with TFRecordReader(f"{folder}/words.tfrecord") as reader:
        ...         len(reader), reader[0], reader[-1], list(reader.offsets)
        (2, b'one', b'three', [0, 19])
    """

    def __init__(self, path: StrPath, offsets: Iterable[int] | None = None) -> None:
        self.path = Path(path).absolute()
        self._open()
        self.offsets: Sequence[int] = array("Q", self._walk(0) if offsets is None else offsets)
        if offsets is not None:
            self._check_offsets()

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, index: SupportsIndex) -> bytes:
        if isinstance(index, slice):
            raise TypeError("a TFRecordReader takes one integer, not a slice; read one by one")
        position = range(len(self))[operator.index(index)]  # IndexError, negative numbers
        start = self.offsets[position]
        end = self.offsets[position + 1] if position + 1 < len(self) else self._size
        record = self._read(start, end)
        length = self._length(start, record[: _HEADER.size])
        if length + _OVERHEAD != end - start:
            raise self._error(start, f"a record of {length} bytes of data, the index says to {end}")
        data = record[_HEADER.size : -_FOOTER.size]
        if _masked_crc32c(data) != _FOOTER.unpack(record[-_FOOTER.size :])[0]:
            raise self._error(start, f"the checksum of the {length} bytes of data does not match")
        return data

    def __iter__(self) -> Iterator[bytes]:
        return map(self.__getitem__, range(len(self)))

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
        data = self._read_some(start, end)
        while len(data) < end - start:  # Linux reads 2 GiB at most at once
            more = self._read_some(start + len(data), end)
            if not more:
                raise self._error(
                    start + len(data), "the file ends here, it was longer when opened"
                )
            data += more
        return data

    def _read_some(self, start: int, end: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self._file.fileno(), end - start, start)
        with self._lock:  # Windows, where no fork can copy a held lock
            self._file.seek(start)
            return self._file.read(end - start)

    def _error(self, offset: int, reason: str) -> TFRecordError:
        return TFRecordError(f"{self.path}, byte {offset}: {reason}")

    def _length(self, start: int, header: bytes) -> int:
        length, crc = _HEADER.unpack(header)
        if _masked_crc32c(header[:8]) != crc:
            packing = _COMPRESSED.get(header[:2]) if start == 0 else None
            hint = f"; if it is compressed ({packing}), decompress it" if packing else ""
            raise self._error(start, f"the checksum of the record's length does not match{hint}")
        return int(length)

    def _walk(self, at: int) -> Iterator[int]:
        while at < self._size:
            header = self._read(at, min(at + _HEADER.size, self._size))
            if len(header) < _HEADER.size:
                raise self._error(at, f"truncated: {len(header)} bytes of a record's header of 12")
            end = at + self._length(at, header) + _OVERHEAD
            if end > self._size:
                raise self._error(
                    at, f"truncated: this record ends at {end}, the file at {self._size}"
                )
            yield at
            at = end

    def _check_offsets(self) -> None:
        edges = [*self.offsets, self._size]
        if edges[0] != 0:
            raise self._error(0, "no offset for the record here: make the index again")
        for start, end in itertools.pairwise(edges):
            if end - start < _OVERHEAD:
                raise self._error(start, f"no record ends at {end}: make the index again")
        for extra in itertools.islice(self._walk(edges[-2] if len(self) else 0), 1, 2):
            raise self._error(extra, "no offset for the record here: make the index again")


class TFRecordWriter:
    """Writes a TFRecord file, which gets its name only when complete.

    In a `with` block an exception leaves no file, a kill only a .tmp file.

    Raises:
        FileExistsError: the file exists.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with TFRecordWriter(f"{folder}/a.tfrecord") as writer:
        ...         [writer.write(b"first"), writer.write(b"second")]  # offsets
        [0, 21]
    """

    def __init__(self, path: StrPath) -> None:
        self._path = Path(path).absolute()
        self._refuse_existing()
        self._temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(4)}.tmp")
        self._file = self._temporary.open("xb")
        self._size = 0

    def write(self, record: BytesLike) -> int:
        """Append a record and return its offset in bytes.

        Args:
            record: bytes-like, of any length.

        Raises:
            TypeError: not bytes-like.
        """
        data = _as_bytes(record)
        length = len(data).to_bytes(8, "little")
        header = length + _FOOTER.pack(_masked_crc32c(length))
        self._file.writelines([header, data, _FOOTER.pack(_masked_crc32c(data))])
        offset, self._size = self._size, self._file.tell()
        return offset

    def close(self) -> None:
        """Finish the file and give it its name; a second call does nothing."""
        if self._file.closed:
            return
        try:
            if self._file.tell() != self._size:
                raise OSError(f"{self._path}: an earlier write stopped inside a record")
            self._file.flush()
            os.fsync(self._file.fileno())  # else a power cut could leave the name without its bytes
            self._file.close()
            self._refuse_existing()
            self._temporary.rename(self._path)
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
        if self._path.exists():
            raise FileExistsError(f"{self._path} exists: remove it or choose another name")

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # on a full disk the last flush fails
            self._file.close()
        self._temporary.unlink(missing_ok=True)


def crc32c(data: BytesLike) -> int:
    """The CRC32C (Castagnoli) of bytes, by a native package if one is installed.

    For 100 KB on one core of an AMD EPYC: 27 GB/s with crc32c or google-crc32c, 0.4 GB/s without.

    Example:
        >>> hex(crc32c(b"123456789"))  # RFC 3720 names this value as the check
        '0xe3069283'
    """
    return _implementation()(_as_bytes(data))


@functools.cache
def _implementation() -> Callable[[bytes], int]:
    with contextlib.suppress(ModuleNotFoundError):
        return importlib.import_module("crc32c").crc32c  # type: ignore[no-any-return]
    with contextlib.suppress(ModuleNotFoundError):
        google = importlib.import_module("google_crc32c")
        if google.implementation == "c":  # its Python version is 50 times slower than the one here
            return google.value  # type: ignore[no-any-return]
    return _folded_crc32c


def _masked_crc32c(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _folded_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for start in range(0, len(data), _CHUNK):
        crc = _update(crc, data[start : start + _CHUNK])
    return crc ^ 0xFFFFFFFF


def _update(crc: int, data: bytes) -> int:
    """The state of a CRC after more bytes.

    The bits are a polynomial over GF(2), the first bit its highest power, and the CRC is the remainder. With
    a multiple x**a + x**b + ... + 1 of the divisor, the first bits can be removed and added again a - b, ...,
    a bits further on. With integers as long as the data, one step does that for thousands of bits.
    """
    table = _table()
    num_bits = 8 * len(data)
    if num_bits > 8 * 72:
        bits = int.from_bytes(data, "little") ^ crc
        for exponents in _SPARSE:
            bits, num_bits = _fold(bits, num_bits, exponents)
        data = (bits << -num_bits % 8).to_bytes(-(-num_bits // 8), "little")
        crc = 0
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 255]
    return crc


def _fold(bits: int, num_bits: int, exponents: tuple[int, ...]) -> tuple[int, int]:
    """Bits with the same remainder, at most as many as the first exponent; and their number."""
    for scale in range((num_bits // exponents[0]).bit_length() - 1, -1, -1):
        degree, second, *others = (exponent << scale for exponent in exponents)
        while num_bits > degree:
            size = min(num_bits - degree, degree - second)
            first = bits & (1 << size) - 1
            moved = first
            for exponent in others:
                moved ^= first << second - exponent
            bits = bits >> size ^ moved << degree - second - size
            num_bits -= size
    return bits, num_bits


@functools.cache
def _table() -> tuple[int, ...]:
    def remainder(byte: int) -> int:
        for _ in range(8):
            byte = byte >> 1 ^ (_REVERSED if byte & 1 else 0)
        return byte

    return tuple(map(remainder, range(256)))


def _as_bytes(data: BytesLike) -> bytes:
    try:
        return data if isinstance(data, bytes) else memoryview(data).tobytes()
    except TypeError as error:
        kind = type(data).__name__
        raise TypeError(f"a record is bytes, got {kind}; for text: text.encode()") from error
