"""What the markers of a JPEG say, up to its first scan.

Source: ITU-T T.81 (JPEG), annex B. The index of segments: docs/en/packed_jpeg.md.
"""

import functools
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

INDEX_MARKER = 0xE9  # APP9
INDEX_NAME = b"FLAMBEAU\0\x01"  # the last byte is the version
MAX_PIXELS = 89_478_485  # as in decode.py
# Frames and tables, SOS, DQT, DRI, applications' data, comment: what libjpeg takes before a scan.
_MARKERS = {*range(0xC0, 0xD0), 0xDA, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE} - {0xC8, 0xCC}
_SAMPLINGS = (
    (1, 1),
    (2, 1),
    (1, 2),
    (2, 2),
    (4, 1),
    (1, 4),
)  # luma to chroma: those that TurboJPEG knows


Spans = list[tuple[int, int, int]]  # marker, begin and end of its body


class JpegError(ValueError):
    """No JPEG, a damaged one, or of a kind that is not handled here; the message is the reason."""


class Component(NamedTuple):
    """A colour component: its id, sampling factors, and its Huffman tables in the scan."""

    id: int
    h: int
    v: int
    dc: int
    ac: int


class Jpeg(NamedTuple):
    """The headers of a JPEG with one scan of everything.

    Attributes:
        segments: (marker, body) of each, the scan's last.
        mcu: height and width in pixels of a minimum coded unit.
        mcus: rows and columns of minimum coded units.
        scan: where the entropy-coded data begins.
        bounds: (S + 1,) int64, where the segments begin, and the end of the image, after the index; None: the
            file has no index.
    """

    segments: list[tuple[int, bytes]]
    width: int
    height: int
    components: tuple[Component, ...]
    mcu: tuple[int, int]
    mcus: tuple[int, int]
    restart_interval: int
    scan: int
    bounds: NDArray[np.int64] | None

    def huffman(self) -> dict[tuple[int, int], tuple[bytes, bytes]]:
        """(0 for DC or 1 for AC, id) -> (number of codes of each length, symbols)."""
        return _huffman([body for marker, body in self.segments if marker == 0xC4])


def read_markers(data: bytes, spans: Spans | None = None) -> Jpeg:
    """The headers of a JPEG with 1 or 3 components of 8 bits and one Huffman-coded, not progressive scan.

    Args:
        data: the whole file.
        spans: what `walk` returns for it.

    Raises:
        JpegError: it is none; damaged Huffman tables go unnoticed here.
    """
    try:
        spans = walk(data) if spans is None else spans
        segments = [(marker, data[begin:end]) for marker, begin, end in spans]
        frames = [s for s in segments if 0xC0 <= s[0] <= 0xCF and s[0] not in (0xC4, 0xC8)]
        if len(frames) != 1:
            raise JpegError("its headers are damaged")
        marker, body = frames[0]
        if marker > 0xC1:
            raise JpegError("progressive" if marker == 0xC2 else "neither baseline nor progressive")
        precision, height, width = struct.unpack_from(">BHH", body)
        components, mcu = _components(precision, body[5:], segments[-1][1])
        if not 0 < width * height <= MAX_PIXELS:
            raise JpegError(f"{width} x {height} pixels: between 1 and {MAX_PIXELS} are handled")
        intervals = [struct.unpack(">H", body)[0] for marker, body in segments if marker == 0xDD]
        return Jpeg(
            segments,
            width,
            height,
            components,
            mcu,
            (-(-height // mcu[0]), -(-width // mcu[1])),
            intervals[-1] if intervals else 0,
            spans[-1][2],
            _bounds([body for marker, body in segments if marker == INDEX_MARKER], spans[-1][2]),
        )
    except (IndexError, struct.error) as error:
        raise JpegError("its headers are damaged or cut short") from error


def has_index(data: bytes) -> bool:
    """Whether an index of segments stands before the first scan; never raises."""
    try:
        spans = walk(data)
    except JpegError:
        return False
    return any(m == INDEX_MARKER and data.startswith(INDEX_NAME, begin) for m, begin, _ in spans)


def walk(data: bytes) -> Spans:
    """The marker segments up to that of the first scan.

    Raises:
        JpegError: no JPEG, or its segments do not follow each other.
    """
    if data[:2] != b"\xff\xd8":
        raise JpegError("not a JPEG")
    at, marker, end, spans = 2, 0, len(data), []
    while marker != 0xDA:
        if at + 4 > end:
            raise JpegError("its headers are damaged or cut short")
        if data[at] != 0xFF:
            raise JpegError("its headers are damaged")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker not in _MARKERS:
            raise JpegError("it holds no image" if marker == 0xD9 else "its headers are damaged")
        length = data[at + 2] << 8 | data[at + 3]
        begin, at = at + 4, at + 2 + length
        if length < 2 or at > end:
            raise JpegError("its headers are damaged or cut short")
        spans.append((marker, begin, at))
    return spans


def put_marker(marker: int, body: bytes) -> bytes:
    """A marker segment as it stands in a file."""
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


@functools.lru_cache(maxsize=64)  # the files of a data set are of few kinds
def _components(
    precision: int, frame: bytes, scan: bytes
) -> tuple[tuple[Component, ...], tuple[int, int]]:
    """The components, and height and width of an MCU, of what a frame says behind its size, and a scan."""
    count = frame[0]
    if precision != 8 or count not in (1, 3):
        raise JpegError(f"{count} components of {precision} bits: only 1 or 3 of 8 are handled")
    if scan[0] != count or len(scan) != 4 + 2 * count:
        raise JpegError("its components are in several scans")
    components = []
    for k in range(count):
        name, sampling, tables = frame[1 + 3 * k], frame[2 + 3 * k], scan[2 + 2 * k]
        # A single component is not interleaved: its sampling factors mean nothing (A.2.2).
        h, v = (sampling >> 4, sampling & 15) if count > 1 else (1, 1)
        components.append(Component(name, h, v, tables >> 4, tables & 15))
    if scan[1:-3:2] != bytes(c.id for c in components) or scan[-3:] != b"\0\x3f\0":
        raise JpegError("its headers are damaged")
    return tuple(components), _mcu(components)


def _mcu(components: list[Component]) -> tuple[int, int]:
    factors = [f for c in components for f in (c.h, c.v)]
    if min(factors) < 1 or max(factors) > 4 or len({c.id for c in components}) < len(components):
        raise JpegError("its headers are damaged")
    h_max, v_max = max(c.h for c in components), max(c.v for c in components)
    luma, chroma = components[0], components[-1]
    usual = {(chroma.h * x, chroma.v * y) for x, y in _SAMPLINGS}
    if (
        (luma.h, luma.v) != (h_max, v_max)
        or (h_max, v_max) not in usual
        or any((c.h, c.v) != (chroma.h, chroma.v) for c in components[1:])
        or sum(c.h * c.v for c in components) > 10  # B.2.3: no interleaved scan may hold more
    ):
        raise JpegError("its chroma is subsampled in an unusual way")
    return 8 * v_max, 8 * h_max


def _huffman(bodies: list[bytes]) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    found = {}
    for body in bodies:
        at = 0
        while at < len(body):
            counts = body[at + 1 : at + 17]
            symbols = body[at + 17 : at + 17 + sum(counts)]
            if len(counts) < 16 or len(symbols) < sum(counts):
                raise JpegError("its headers are damaged")
            found[body[at] >> 4, body[at] & 15] = counts, symbols
            at += 17 + len(symbols)
    return found


def _bounds(bodies: list[bytes], scan: int) -> NDArray[np.int64] | None:
    parts = [body for body in bodies if body.startswith(INDEX_NAME)]
    if not parts:
        return None
    if [(body[10], body[11]) for body in parts] != [(k, len(parts)) for k in range(len(parts))]:
        raise JpegError("its index of segments is damaged")
    if any(len(body) % 2 for body in parts):
        raise JpegError("its index of segments is damaged")
    lengths = np.frombuffer(b"".join(body[12:] for body in parts), ">u2")
    bounds = np.full(len(lengths) + 1, scan)
    bounds[1:] = lengths
    bounds[1:] += 2  # the marker behind each
    return bounds.cumsum()
