"""Decompression of blocks of a known size; what is damaged is found out in little memory.

Source: the README of N5, "Currently supported compression schemes"; RFC 8878 (Zstandard); c-blosc's
README_CHUNK_FORMAT; lz4-java's LZ4BlockOutputStream, which is what N5's `lz4` means.
"""

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Protocol

from flambeau.data.sources.optional_packages import extra
from flambeau.errors import InputError

_ZSTD_WINDOW = 1 << 27  # bytes, of memory, that a frame may ask for: what its own command allows
_BLOSC_HEADER = 16
# Of each part: this name, how it is stored, its size, that of what it holds, and a checksum of that. The
# checksum is ignored: xxHash of Python alone takes longer than all the rest.
_LZ4_PART = struct.Struct("<8sBIII")
_LZ4_STORED, _LZ4_PACKED = 0x10, 0x20


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


_DECOMPRESSORS: dict[str, Callable[[], _Decompressor]] = {
    "gzip": lambda: zlib.decompressobj(47),  # gzip's or zlib's header, whichever is there
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}


def unpack(data: bytes, size: int, compression: str) -> bytes:
    """Data that must be of a size once it is decompressed.

    Args:
        data: all of it.
        size: bytes of what it holds.
        compression: 'raw', 'gzip' (or zlib), 'bzip2', 'xz', 'zstd', 'blosc' or 'lz4'.

    Returns:
        `size` bytes.

    Raises:
        OSError: it is damaged; no more than size + 1 bytes are unpacked to find that out.
        InputError: a package that this compression needs is not installed.

    Example:
        >>> unpack(zlib.compress(bytes(1000)), 1000, "gzip") == bytes(1000)
        True
    """
    if compression in _PACKED:
        try:
            data = _PACKED[compression](data, size)
        except InputError:
            raise
        except Exception as error:
            # These packages have an exception each, and some raise RuntimeError, ValueError or MemoryError.
            raise OSError(f"damaged {compression} data: {error}") from error
    elif compression != "raw":
        decompressor = _DECOMPRESSORS[compression]()
        try:
            data = decompressor.decompress(data, size + 1)
        except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
            raise OSError(f"damaged {compression} data: {error}") from error
        if not decompressor.eof:
            raise OSError(f"damaged {compression} data: no end after {len(data)} bytes of {size}")
    if len(data) != size:
        raise OSError(f"a block has {len(data)} bytes of data, expected {size}")
    return data


def why_unreadable(compression: str) -> str | None:
    """Why data compressed so cannot be read here, and what to do; None where they can be."""
    if compression in ("raw", *_DECOMPRESSORS):
        return None
    if compression not in _PACKED:
        known = ", ".join(("raw", *_DECOMPRESSORS, *_PACKED))
        return (
            f"is compressed by {compression!r:.40}; what can be read is {known}\n"
            "Write it again with one of them: raw for images that are encoded, else gzip"
        )
    try:
        extra("zstandard" if compression == "zstd" else "numcodecs", what="reading it")
    except InputError as error:
        return f"is compressed by {compression}; {error}"
    return None


def _zstd(data: bytes, size: int) -> bytes:
    zstandard = extra("zstandard", what="zstd")
    # Not by the size that stands in the frame, which may be any: as a stream, up to one byte too many.
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    with decompressor.stream_reader(data) as reader:
        unpacked: bytes = reader.read(size + 1)
    return unpacked


def _blosc(data: bytes, size: int) -> bytes:
    codec = extra("numcodecs", what="blosc").blosc
    if len(data) < _BLOSC_HEADER:
        raise ValueError(f"{len(data)} bytes have no header")
    unpacked_size, _, packed_size = struct.unpack_from("<III", data, 4)
    if (unpacked_size, packed_size) != (size, len(data)):  # before any memory is asked for
        raise ValueError(
            f"its header says {packed_size} bytes that hold {unpacked_size}; "
            f"there are {len(data)}, expected to hold {size}"
        )
    unpacked: bytes = codec.decompress(data)
    return unpacked


def _lz4(data: bytes, size: int) -> bytes:
    codec = extra("numcodecs", what="lz4").lz4
    parts: list[bytes] = []
    at, left = 0, size
    while True:
        name, token, packed_size, unpacked_size, _ = _LZ4_PART.unpack_from(data, at)
        at += _LZ4_PART.size
        if name != b"LZ4Block":
            raise ValueError(f"no part begins at byte {at - _LZ4_PART.size}")
        if not unpacked_size:  # the end
            return b"".join(parts)
        if unpacked_size > left or packed_size > len(data) - at:
            raise ValueError(
                f"the part at byte {at} has {packed_size} bytes that hold {unpacked_size}"
            )
        part, left = data[at : at + packed_size], left - unpacked_size
        if token & 0xF0 == _LZ4_PACKED:  # numcodecs needs the size before it
            part = codec.decompress(struct.pack("<i", unpacked_size) + part)
        elif token & 0xF0 != _LZ4_STORED or packed_size != unpacked_size:
            raise ValueError(f"the part at byte {at} is of the unknown kind {token}")
        parts.append(part)
        at += packed_size


_PACKED: dict[str, Callable[[bytes, int], bytes]] = {"zstd": _zstd, "blosc": _blosc, "lz4": _lz4}
