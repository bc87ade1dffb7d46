"""The records of a .rec or .tfrecord file, past damage."""

import bisect
import functools
import mmap
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from flambeau.data.sources.packed_targets import of_mark
from flambeau.data.sources.recordio_file import RecordSource
from flambeau.data.sources.tfrecord_file import IMAGES, LABELS, TASK, pixel_shape
from flambeau.errors import InputError
from flambeau.images.decode import Stored
from flambeau.recipes.data.recordio import RecordError, unpack
from flambeau.recipes.data.tf_example import parse_example
from flambeau.recipes.data.tfrecord import crc32c

_MAGIC = b"\x0a\x23\xd7\xce"
_TAIL = 16  # bytes: no image of the usual formats ends in so many zeros
_TF_OVERHEAD = 16
_SEARCH = 1 << 20  # bytes that are searched at once


class ScannedRecord(NamedTuple):
    """A record of a packed file, good or damaged.

    Attributes:
        label: number or name of its class, its label vector, the names of its labels, or its mask as a file;
            None if none is looked at.
        content: to write it again in its format.
        whole: with `damage`: undamaged, but not supported; None if unknown.
        doubt: what may be wrong, if no checksum can decide.
    """

    name: str
    offset: int | None
    image: Stored | None = None
    label: int | str | Tensor | tuple[str, ...] | bytes | None = None
    content: Any = None
    damage: str | None = None
    whole: bool | None = False
    doubt: str | None = None


# ---------------------------------------------------------------- RecordIO


def walk_rec(path: Path, data: mmap.mmap) -> Iterator[ScannedRecord]:
    index = path.with_suffix(".idx")
    keys = index_keys(path)
    yield from _index_damage(index)
    starts = sorted(keys)
    seen = set()
    at = 0
    number = 0
    last: list[ScannedRecord] = []  # of the record that ends at `at`
    are_numbers = functools.cache(lambda: _are_numbers(path))
    while at < len(data):
        record = _rec_at(data, at)
        key = keys.get(at)
        name = f"record {number}" + ("" if key is None else f" (key {key})")
        if not isinstance(record, str):
            payload, end = record
            seen.add(at)
            yield from last
            last = [_rec_record(name, at, key, payload, are_numbers)]
            if keys and key is None:
                last.append(ScannedRecord(name, at, damage=f"{index.name} has no key for it"))
            at, number = end, number + 1
            continue
        end = _next_rec(data, at + 4)
        doubt = f"damage that begins at byte {at} may reach into it"
        if last and _may_reach_back(data, at, end):
            last[0] = last[0]._replace(doubt=doubt)
        yield from last
        last = []
        lost = starts[bisect.bisect_left(starts, at) : bisect.bisect_left(starts, end)]
        seen.update(lost)
        yield ScannedRecord(name, at, damage=f"{record}; the next record begins at byte {end}")
        for start in lost:
            number += 1
            if start != at:
                yield ScannedRecord(
                    f"record {number - 1} (key {keys[start]})",
                    start,
                    damage=f"lost: it lies in the damaged bytes {at} .. {end}",
                )
        at, number = end, number + (not lost)
    yield from last
    for start in sorted(set(starts) - seen):
        yield ScannedRecord(
            f"key {keys[start]}", start, damage=f"{index.name}: no record begins there"
        )


def _are_numbers(path: Path) -> bool:
    """Whether training takes the labels of a file for numbers, and not for classes."""
    try:
        return RecordSource(path).task == "regression"
    except InputError:
        return False


def _rec_record(
    name: str, at: int, key: int | None, payload: bytes, are_numbers: Callable[[], bool]
) -> ScannedRecord:
    try:
        header, image = unpack(payload)
    except RecordError as error:
        return ScannedRecord(name, at, damage=str(error), whole=None)
    label = header.label
    if isinstance(label, Tensor):
        if len(label) != 1 or of_mark(header.id2) is not None:
            return ScannedRecord(name, at, image, label, (payload, key))
        label = label[0].item()
    if not float(label).is_integer() and are_numbers():
        return ScannedRecord(name, at, image, torch.tensor([label]), (payload, key))
    if not float(label).is_integer() or label < 0:
        return ScannedRecord(
            name, at, damage=f"label {label:g} is no number of a class", whole=None
        )
    return ScannedRecord(name, at, image, int(label), (payload, key))


def _rec_at(data: mmap.mmap, start: int) -> tuple[bytes, int] | str:
    """The payload of the record at `start`, and its end; or what is wrong with it."""
    at = start
    flag = 1
    pieces = []
    while flag in (1, 2):
        if at + 8 > len(data):
            return f"the file ends at byte {len(data)}, within a header"
        magic, word = struct.unpack_from("<4sI", data, at)
        flag = word >> 29
        length = word & 0x1FFFFFFF
        end = at + 8 + length + -length % 4
        if magic != _MAGIC:
            return f"no header at byte {at}: {magic.hex()} instead of {_MAGIC.hex()}"
        if flag not in ((0, 1) if at == start else (2, 3)):
            return f"a header with flag {flag} at byte {at}"
        if end > len(data):
            return f"it would end at byte {end}, and the file ends at {len(data)}"
        if flag in (1, 2) and length % 4:
            return f"a part of {length} bytes, not 4 x n, at byte {at}"
        piece = data[at + 8 : at + 8 + length]
        inside = next(_aligned(piece), None)
        if inside is not None:
            return f"a wrong length: another header lies in it at byte {at + 8 + inside}"
        if any(data[at + 8 + length : end]):
            return f"the padding at byte {at + 8 + length} is not zero"
        pieces.append(piece)
        at = end
    return _MAGIC.join(pieces), at


def _may_reach_back(data: mmap.mmap, at: int, end: int) -> bool:
    """Whether damage in the position of a header may extend into the record before it.

    It does not if the bytes are still recognizable as a header, by the magic number or by a length that leads
    to the next one; nor if they are empty and the record before them does not end in zeros.
    """
    head = data[at : at + 8]
    if _MAGIC.startswith(head[:4]):
        return False
    if not any(head):
        return not any(data[max(0, at - _TAIL) : at])
    length = int.from_bytes(head[4:], "little") & 0x1FFFFFFF
    return at + 8 + length + -length % 4 != end


def _aligned(piece: bytes) -> Iterator[int]:
    at = piece.find(_MAGIC)
    while at >= 0:
        if at % 4 == 0:
            yield at
        at = piece.find(_MAGIC, at + 1)


def _next_rec(data: mmap.mmap, at: int) -> int:
    """The start of the next record; the end of the file if there is none."""
    while (at := data.find(_MAGIC, at)) >= 0:
        if at % 4 == 0 and at + 8 <= len(data) and data[at + 7] >> 5 in (0, 1):
            return at
        at += 1
    return len(data)


_INDEX_LINE = re.compile(rb"(-?\d{1,19})\s+(\d{1,19})\s*")


def index_keys(path: Path) -> dict[int, int]:
    """The keys of a .rec file by offset, as far as its .idx is readable."""
    index = path.with_suffix(".idx")
    lines = index.read_bytes().splitlines() if index.is_file() else []
    matches = (match for match in map(_INDEX_LINE.fullmatch, lines) if match)
    return {int(match[2]): int(match[1]) for match in matches}


def _index_damage(index: Path) -> Iterator[ScannedRecord]:
    lines = index.read_bytes().splitlines() if index.is_file() else []
    for number, line in enumerate(lines, start=1):
        if not _INDEX_LINE.fullmatch(line):
            damage = f"line {number} is not 'key<TAB>offset': {line[:40]!r}"
            yield ScannedRecord(index.name, None, damage=damage)


# ---------------------------------------------------------------- TFRecord


def walk_tfrecord(data: mmap.mmap) -> Iterator[ScannedRecord]:
    at, number = 0, 0
    while at < len(data):
        length = _tf_length(data, at)
        if length is not None and at + _TF_OVERHEAD + length <= len(data):
            end = at + _TF_OVERHEAD + length
            record = data[at + 12 : end - 4]
            if _masked(record) != struct.unpack_from("<I", data, end - 4)[0]:
                damage = f"the checksum of its {length} bytes does not match"
                yield ScannedRecord(f"record {number}", at, damage=damage)
            else:
                yield _tf_record(f"record {number}", at, record)
        else:
            what = "the checksum of its length does not match"
            if length is not None:
                what = f"it would end at byte {at + _TF_OVERHEAD + length}, the file ends at {len(data)}"
            end = _next_tf(data, at + 1)
            lost = f"; the next whole record begins at byte {end}, what lies between is lost"
            yield ScannedRecord(f"record {number}", at, damage=what + lost * (end < len(data)))
        at, number = end, number + 1


def _tf_record(name: str, at: int, record: bytes) -> ScannedRecord:
    """A record whose checksum matches: anything wrong with it was written so."""
    try:
        features = parse_example(record)
    except ValueError as error:
        return ScannedRecord(name, at, damage=str(error), whole=True)
    image = next((v[0] for k in IMAGES if isinstance(v := features.get(k), list) and v), None)
    if image is None:
        return ScannedRecord(name, at, damage="no image in its Example", whole=True)
    text = features.get("image/class/text")
    label: int | str | Tensor | None = None
    vector = features.get(LABELS[0])
    if TASK in features and isinstance(vector, Tensor):
        label = vector
    elif isinstance(text, list) and text:
        label = text[0].decode(errors="replace")
    else:
        numbers = (features[k] for k in LABELS if isinstance(features.get(k), Tensor))
        label = next((int(v[0]) for v in numbers if len(v) == 1), None)
    shape = pixel_shape(features, image)
    pixels = np.frombuffer(image, np.uint8).reshape(shape) if any(shape) else image
    return ScannedRecord(name, at, pixels, label, record)


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _tf_length(data: mmap.mmap, at: int) -> int | None:
    """The length of the record at an offset; None if its checksum does not match."""
    if at + 12 > len(data):
        return None
    length, crc = struct.unpack_from("<QI", data, at)
    return int(length) if _masked(data[at : at + 8]) == crc else None


def _next_tf(data: mmap.mmap, at: int) -> int:
    """The start of the next whole record; the end of the file if there is none.

    Each offset is tried, a million at once: a length whose checksum matches by chance occurs once in four
    thousand million bytes, and then the checksum of the data does not match.
    """
    table = _crc_table()
    for start in range(at, len(data) - 11, _SEARCH):
        window = np.frombuffer(data[start : start + _SEARCH + 11], np.uint8)
        count = len(window) - 11
        crc = np.full(count, 0xFFFFFFFF, np.uint32)
        for number in range(8):
            crc = table[(crc ^ window[number : number + count]) & 255] ^ (crc >> np.uint32(8))
        crc ^= np.uint32(0xFFFFFFFF)
        masked = (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(0xA282EAD8)
        stored = sum(
            window[8 + k : 8 + k + count].astype(np.uint32) << np.uint32(8 * k) for k in range(4)
        )
        for offset in np.flatnonzero(masked == stored).tolist():
            begin = start + offset
            length = _tf_length(data, begin)
            if length is None or begin + _TF_OVERHEAD + length > len(data):
                continue
            end = begin + _TF_OVERHEAD + length
            if _masked(data[begin + 12 : end - 4]) == struct.unpack_from("<I", data, end - 4)[0]:
                return begin
    return len(data)


def _crc_table() -> Any:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(
            table & 1, table >> np.uint32(1) ^ np.uint32(0x82F63B78), table >> np.uint32(1)
        )
    return table.astype(np.uint32)
