"""Facts of images almost without decoding them: exact copies, sizes, formats, broken headers, blank ones.

Each image is read once. Its length and some bytes from its middle are hashed, and all of its bytes only if
another image agrees in those; it is decoded only if it takes so few bytes that it may be blank.
"""

import time
from collections.abc import Sequence

import numpy as np

from flambeau.data.check.image_facts import (
    ImageFacts,
    content_hash,
    empty_facts,
    read_each,
    record_facts,
)
from flambeau.data.sources.source import PixelKind, Source, stacked_channels
from flambeau.images.decode import Picture, Stored
from flambeau.images.file_formats import format_of

_MIDDLE_BYTES = 1 << 12  # chosen; those of two photographs are never the same
_BYTES_PER_PIXEL = 0.03  # an image of one color has less: a JPEG about 0.016
_TABLES_BYTES, _HEADER_BYTES = 700, 150  # besides the pixels: in a JPEG, and in other formats
_LEVELS = 12  # range of stored pixels that may be blank


def measure_stored(source: Source, kind: PixelKind, *, seconds: float) -> ImageFacts:
    """Read each image of a source; those for which no time was left count as missing.

    Both hashes are of the stored bytes, except for images that may be blank; facts that need decoding are
    those of an image with all levels.
    """
    until = time.monotonic() + seconds
    facts = empty_facts(len(source))
    facts.spread[:], facts.brightest[:] = 255, 255

    stacked = stacked_channels(source)

    def note(number: int, stored: Stored) -> None:
        _note(facts, number, stored, kind, stacked)

    read_each(source, range(len(source)), note, facts.problems, until=until)
    _compare_whole(source, facts, until)
    return facts


def _note(
    facts: ImageFacts, number: int, stored: Stored, kind: PixelKind, stacked: int | None
) -> None:
    picture = Picture(stored)
    if _may_be_blank(stored, picture.width * picture.height):
        record_facts(facts, number, stored, kind, stacked=stacked)
        return
    content = _content(stored)
    middle = max(0, len(content) - _MIDDLE_BYTES) // 2
    start = f"{len(content)} {picture.width} {picture.height} ".encode()
    facts.pixel_hash[number] = content_hash(start, content[middle : middle + _MIDDLE_BYTES])
    if isinstance(stored, bytes):
        facts.formats[number] = format_of(stored)
    facts.is_grey[number] = picture.grey
    facts.height[number] = picture.height
    facts.width[number] = picture.width


def _compare_whole(source: Source, facts: ImageFacts, until: float) -> None:
    """Hash the whole content of images that agree so far."""
    _, of, times = np.unique(facts.pixel_hash, return_inverse=True, return_counts=True)
    repeated = facts.is_read & (times[of] > 1) & (facts.file_hash == 0)
    width = facts.width[repeated]
    facts.width[repeated] = 0  # restored for those that are read in time
    numbers: Sequence[int] = np.flatnonzero(repeated).tolist()
    width_of = dict(zip(numbers, width.tolist(), strict=True))

    def note(number: int, stored: Stored) -> None:
        facts.pixel_hash[number] = content_hash(_content(stored))
        if isinstance(stored, bytes):
            facts.file_hash[number] = facts.pixel_hash[number]
        facts.width[number] = width_of[number]

    read_each(source, numbers, note, facts.problems, until=until)


def _content(stored: Stored) -> memoryview:
    if isinstance(stored, bytes):
        return memoryview(stored)
    return np.ascontiguousarray(stored).data.cast("B")


def _may_be_blank(stored: Stored, num_pixels: int) -> bool:
    if isinstance(stored, bytes):
        header = _TABLES_BYTES if format_of(stored) == "JPEG" else _HEADER_BYTES
        return len(stored) < header + _BYTES_PER_PIXEL * num_pixels
    return stored.dtype == np.uint8 and int(stored.max()) - int(stored.min()) < _LEVELS
