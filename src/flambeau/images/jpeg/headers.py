"""The header of a JPEG, from one walk over its markers.

Source: ITU-T T.81 (JPEG), annex B. The index of segments: docs/en/packed_jpeg.md.
"""

from collections.abc import Iterator
from typing import NamedTuple

from flambeau.images.exif_orientation import UPRIGHT, exif_orientation

# Frames and tables, SOS, DQT, DRI, application data, comment: what libjpeg accepts before a scan.
_MARKERS = {*range(0xC0, 0xD0), 0xDA, 0xDB, 0xDD, *range(0xE0, 0xF0), 0xFE} - {0xC8, 0xCC}
_APP1, _APP9, _HUFFMAN_TABLES, _SCAN = 0xE1, 0xE9, 0xC4, 0xDA
_XMP_NAME = b"http://ns.adobe.com/xap/1.0/\0"
_INDEX_NAME = b"FLAMBEAU\0\x01"  # the last byte is the version


class JpegHeader(NamedTuple):
    """The content of the marker segments before the pixels.

    Attributes:
        unit_height, unit_width: pixels of the blocks that are coded together, 8 to 32.
        height_at: offset of the height, two bytes.
        scan_at: offset of the first scan's marker.
        sequential: one scan holds all components from top to bottom.
        segmented: with the index of scan_segments.py.
    """

    height: int
    width: int
    channels: int
    orientation: int
    unit_height: int
    unit_width: int
    height_at: int
    scan_at: int
    sequential: bool
    segmented: bool


def read_header(data: bytes) -> JpegHeader | None:
    """The header of a JPEG of 8 bits, grey or three colors, Huffman-coded; else None."""
    frame = 0
    scan = 0
    exif = b""
    xmp = b""
    segmented = False
    progressive = False
    for marker, begin, end in segments(data):
        if marker in (0xC0, 0xC1, 0xC2) and not frame:
            frame = begin
            progressive = marker == 0xC2
        elif marker == _APP1 and data.startswith(b"Exif\0\0", begin):
            if exif:
                return None  # in several parts, which Pillow joins
            exif = data[begin:end]
        elif marker == _APP1 and data.startswith(_XMP_NAME, begin):
            xmp = data[begin + len(_XMP_NAME) : end]  # the last of several, as in Pillow
        elif marker == _APP9:
            segmented = segmented or data.startswith(_INDEX_NAME, begin)
        elif 0xC0 <= marker <= 0xCF and marker != _HUFFMAN_TABLES:
            return None
        elif marker == _SCAN:
            scan = begin
    if not frame or not 0 < scan < len(data):
        return None
    precision, channels = data[frame], data[frame + 5]
    height = data[frame + 1] << 8 | data[frame + 2]
    width = data[frame + 3] << 8 | data[frame + 4]
    factors = data[frame + 7 : frame + 7 + 3 * channels : 3]
    if precision != 8 or channels not in (1, 3) or not height or not width:
        return None
    across = [factor >> 4 for factor in factors]
    down = [factor & 15 for factor in factors]
    if min(across + down) < 1 or max(across + down) > 4:
        return None
    return JpegHeader(
        height,
        width,
        channels,
        exif_orientation(exif, xmp) if exif or xmp else UPRIGHT,
        unit_height=8 * max(down),
        unit_width=8 * max(across),
        height_at=frame + 1,
        scan_at=scan - 4,
        sequential=not progressive and data[scan] == channels,
        segmented=segmented,
    )


def segments(data: bytes, at: int = 2) -> Iterator[tuple[int, int, int]]:
    """Marker, begin and end of each marker segment's body from `at` on; the next scan's comes last.

    It stops before that if the segments are not contiguous, or `data` is no JPEG.
    """
    marker = 0
    size = len(data)
    if not data.startswith(b"\xff\xd8"):
        return
    while marker != _SCAN and at + 4 <= size and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        length = data[at + 2] << 8 | data[at + 3]
        begin, at = at + 4, at + 2 + length
        if marker not in _MARKERS or length < 2 or at > size:
            return
        yield marker, begin, at
