"""The files in a zip that belong to samples, read as those of a tar are; see `tar_file`.

Source: PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.7 (local header) and 4.4.4 (flags).

A name up to its last dot is a sample, since zipped folders hold names such as cat.0.jpg; only the ending of a
mask has two parts (cat.0.mask.png). Where the files of samples are mixed, the order is that of their names.
"""

import os
import struct
import zipfile
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flambeau.data.sources.tar_masks import mask_in
from flambeau.errors import ZIP_ERRORS
from flambeau.recipes.data.tar_shards import ShardError, TarReader

_LOCAL = struct.Struct("<4s22xHH")
_MOST = 0x7FFFF000  # bytes of a file, as in a tar
MOST_PACKED = 1032  # what deflate packs into one byte at most
SLACK = 64  # bytes of a file that is packed into nearly none
_ENCRYPTED = 1
_MAC = "__MACOSX/"  # copies of a Mac's attributes, under the names of the images


class UnfitZip(ShardError):
    """The zip is whole and packed in a way that is not read."""


class ZipIndex(NamedTuple):
    """N files of a zip: offset, stored and unpacked size, is deflated, unpacked CRC-32."""

    names: Any
    offsets: Any
    sizes: Any
    stored: Any
    packed: Any
    crcs: Any


def index_zip(path: Path) -> ZipIndex:
    """List the files of a zip that belong to samples; only headers are read.

    ShardError: damaged or cut short, encrypted, or compressed by another method than deflate.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            rows = []
            taken: set[tuple[str, str]] = set()
            size = os.fstat(file.fileno()).st_size
            for member in archive.infolist():
                name = member.filename.replace("\\", "/")  # as some programs of Windows write it
                parts = None if name.endswith("/") else split_name(name)
                if parts is None:
                    continue
                if parts in taken:
                    raise UnfitZip(
                        f"{path}, {name!r}: there are two files of this name; zip it again"
                    )
                taken.add(parts)
                _require_readable(member, path)
                rows.append((*parts, name, _place(file, member, path, size), member))
    except ShardError:
        raise
    except ZIP_ERRORS as error:
        raise ShardError(
            f"{path} cannot be read as a zip: {error}; copy or make it again"
        ) from error
    if _is_mixed([row[0] for row in rows]):
        rows.sort(key=lambda row: row[:3])
    members = [row[-1] for row in rows]
    return ZipIndex(
        [row[2] for row in rows],
        array("Q", [row[3] for row in rows]),
        array("Q", [one.file_size for one in members]),
        array("Q", [one.compress_size for one in members]),
        array("B", map(_is_packed, members)),
        array("Q", [one.CRC for one in members]),
    )


def _is_mixed(keys: Sequence[str]) -> bool:
    """Whether files of other samples stand between those of one."""
    changes = sum(key != before for key, before in zip(keys[1:], keys, strict=False))
    return changes + 1 > len({*keys})


def split_name(name: str) -> tuple[str, str] | None:
    """Key and lower-case extension of a file; None for hidden ones, and names without a dot."""
    folder, slash, last = name.rpartition("/")
    stem, _, ending = last.rpartition(".")
    is_hidden = any(part[:1] == "." and part.strip(".") for part in name.split("/"))
    if not stem.strip(".") or not ending or is_hidden or name.startswith(_MAC):
        return None
    first, _, second = stem.rpartition(".")
    if first and mask_in([f"{second}.{ending}".lower()]) is not None:
        stem, ending = first, f"{second}.{ending}"
    return f"{folder}{slash}{stem}", ending.lower()


def _require_readable(member: zipfile.ZipInfo, path: Path) -> None:
    name = f"{path}, {member.filename!r}"
    if member.flag_bits & _ENCRYPTED:
        raise UnfitZip(f"{name} is encrypted; unpack it with its password and zip it without one")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnfitZip(
            f"{name} is compressed by method {member.compress_type}, not by deflate (8); unpack it and "
            "zip it again, best with zip -0, as images do not get smaller"
        )
    most = member.compress_size * (MOST_PACKED if _is_packed(member) else 1)
    if member.file_size > most + SLACK or member.file_size > _MOST:
        raise ShardError(
            f"{name} would have {member.file_size} bytes, more than can be in its "
            f"{member.compress_size}; copy or make the zip again"
        )


def _is_packed(member: zipfile.ZipInfo) -> bool:
    return member.compress_type != zipfile.ZIP_STORED


def _place(file: Any, member: zipfile.ZipInfo, path: Path, size: int) -> int:
    """The offset of a file's first byte."""
    damaged = f"{path}, {member.filename!r}: its header is damaged, or the zip was cut short"
    if member.header_offset < 0:
        raise ShardError(f"{damaged}; copy or make it again")
    file.seek(member.header_offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size:
        raise ShardError(f"{damaged}; copy or make it again")
    mark, name, extra = _LOCAL.unpack(header)
    start = int(member.header_offset) + _LOCAL.size + int(name) + int(extra)
    if mark != b"PK\x03\x04" or start + member.compress_size > size:
        raise ShardError(f"{damaged}; copy or make it again")
    return start


class ZipReader(TarReader):
    """The samples of a zip; what is read has the CRC-32 that the zip says."""

    split = staticmethod(split_name)

    def __init__(self, path: Path, index: ZipIndex) -> None:
        self._unpacked, self._crcs = array("Q", index.sizes), array("Q", index.crcs)
        self._packed = array("B", index.packed)
        super().__init__(path, index._replace(sizes=index.stored))  # type: ignore[arg-type]

    def _read(self, number: int) -> bytes:
        data = super()._read(number)
        if self._packed[number]:
            data = inflated(data, self._unpacked[number])
        if zlib.crc32(data) != self._crcs[number]:
            raise self._error(self._offsets[number], "its bytes are not those that were zipped")
        return data


def packed_places(path: Path) -> dict[tuple[int, int], tuple[int, int]]:
    """Offset and size of the files that are compressed, by their size and CRC-32 after unpacking."""
    index = index_zip(path)
    rows = zip(index.sizes, index.crcs, index.offsets, index.stored, index.packed, strict=True)
    return {(size, crc): (start, stored) for size, crc, start, stored, packed in rows if packed}


def inflated(data: bytes | memoryview, size: int) -> bytes:
    """The `size` bytes that deflate has packed; others of that size if it is damaged."""
    try:
        made = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
    except zlib.error:
        made = b""
    return made if len(made) == size else bytes(size)
