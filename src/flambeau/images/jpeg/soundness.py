"""Whether libjpeg reads a JPEG to its end without an error, found from its markers and tables alone.

Sources: ITU-T T.81 (JPEG), annexes B and G.1.1.1; the calls of ERREXIT in jdmarker.c, jdhuff.c and jdphuff.c
of libjpeg-turbo. It guesses at damage inside of entropy-coded data, with a warning that Pillow ignores, but
refuses markers, tables and scans that are not right. In doubt a file is refused here; then Pillow decodes it.
"""

import functools
from collections.abc import Iterator

import numpy as np

from flambeau.images.jpeg.headers import JpegHeader, segments
from flambeau.images.native import kernel as native

_TABLES, _END, _SCAN, _QUANTIZATION, _INTERVAL = 0xC4, 0xD9, 0xDA, 0xDB, 0xDD
_MOST_SIDE = 65500  # JPEG_MAX_DIMENSION
# Some cameras append bytes after the end marker; more may be another image.
_MOST_BEHIND_END = 1024


def is_sound(data: bytes, header: JpegHeader) -> bool:
    """Whether nothing in a JPEG makes libjpeg end with an error."""
    if max(header.height, header.width) > _MOST_SIDE:
        return False
    frame = _Frame(data, header)
    at = frame.read(data, 2)
    for end in _markers(data, header.scan_at + 2):
        if end < at:  # within the header of a scan
            continue
        if not at or data[end + 1] == _END:
            return at > 0 and len(data) - end - 2 <= _MOST_BEHIND_END
        at = frame.read(data, end)
    return False


def _markers(data: bytes, begin: int) -> Iterator[int]:
    """Where there are markers that are neither fill bytes nor restarts."""
    kernel = native.kernel()
    if kernel is not None:
        at = kernel.next_marker(data, begin)
        while at < len(data):
            yield at
            at = kernel.next_marker(data, at + 2)
        return
    levels = np.frombuffer(data, np.uint8)
    places = np.flatnonzero(levels[begin:-1] == 0xFF) + begin
    codes = levels[places + 1]
    yield from places[(codes != 0) & (codes != 0xFF) & (codes & 0xF8 != 0xD0)].tolist()


class _Frame:
    def __init__(self, data: bytes, header: JpegHeader) -> None:
        frame = header.height_at - 1
        entries = [data[at : at + 3] for at in range(frame + 6, frame + 6 + 3 * header.channels, 3)]
        self._blocks = {entry[0]: (entry[1] >> 4) * (entry[1] & 15) for entry in entries}
        self._quantization_of = {entry[0]: entry[2] for entry in entries}
        self._progressive = data[frame - 3] == 0xC2
        self._is_right = (
            int.from_bytes(data[frame - 2 : frame]) == 8 + 3 * header.channels
            and len(self._blocks) == header.channels
        )
        self._tables: set[int] = set()
        self._quantizations: set[int] = set()
        self._has_scan = False

    def read(self, data: bytes, at: int) -> int:
        """Read what stands before the next scan; return where its pixels begin, or 0 if anything is wrong."""
        marker = 0
        for marker, begin, end in segments(data, at):
            if not self._takes(marker, data[begin:end]):
                return 0
            at = end
        return at if marker == _SCAN else 0

    def _takes(self, marker: int, body: bytes) -> bool:
        """Whether libjpeg takes this marker segment."""
        if marker == _SCAN:
            self._has_scan = True
            return self._is_right and self._takes_scan(body)
        if marker == _TABLES:
            tables = _huffman_tables(body)
            self._tables.update(tables or ())
            return tables is not None
        if self._has_scan:  # rare: comments and other tables between scans
            return False
        if marker == _QUANTIZATION:
            return self._takes_quantization(body)
        return marker != _INTERVAL or len(body) == 2

    def _takes_quantization(self, body: bytes) -> bool:
        """B.2.4.1."""
        while body:
            size = 1 + 64 * (1 + (body[0] >> 4))
            if body[0] >> 4 > 1 or body[0] & 15 > 3 or len(body) < size:
                return False
            self._quantizations.add(body[0] & 15)
            body = body[size:]
        return True

    def _takes_scan(self, body: bytes) -> bool:
        """B.2.3 and G.1.1.1: its components and tables are there, and its band and bits make sense."""
        count = body[0] if body else 0
        names = body[1 : 1 + 2 * count : 2]
        if not count or len(body) != 4 + 2 * count or len({*names}) != count:
            return False
        if not {*names} <= {*self._blocks}:
            return False
        if count > 1 and sum(self._blocks[name] for name in names) > 10:
            return False
        first, last, bits = body[-3:]
        high = bits >> 4
        low = bits & 15
        if self._progressive:
            band = first <= last <= 63 and count == 1 if first else last == 0
            if not band or low > 13 or (high and low != high - 1):
                return False
        elif (first, last, bits) != (0, 63, 0):
            return False
        needed = set()
        for tables in body[2 : 2 + 2 * count : 2]:
            if not first and not high:
                needed.add(tables >> 4)
            if last:
                needed.add(0x10 | tables & 15)
        return (
            needed <= self._tables
            and {self._quantization_of[name] for name in names} <= self._quantizations
        )


@functools.lru_cache(maxsize=64)  # most files of a folder have the same ones
def _huffman_tables(body: bytes) -> tuple[int, ...] | None:
    """The classes and numbers of its tables, None if libjpeg refuses one: B.2.4.2, and C for their codes."""
    found = []
    while body:
        counts = body[1:17]
        symbols = body[17 : 17 + sum(counts)]
        name = body[0]
        code = 0
        if len(counts) < 16 or len(symbols) != sum(counts) or sum(counts) > 256:
            return None
        for length, count in enumerate(counts, start=1):
            code += count
            if code > (1 << length) - 1 and count:  # ones only is no code
                return None
            code <<= 1
        if name & 0xEF > 3 or (name < 0x10 and any(symbol > 15 for symbol in symbols)):
            return None
        found.append(name)
        body = body[17 + len(symbols) :]
    return tuple(found)
