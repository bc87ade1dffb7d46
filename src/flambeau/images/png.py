"""Common PNG files, by a faster inflater than zlib and the C kernel; Pillow reads the rarer ones.

Source: W3C PNG, third edition; python-isal (Intel's ISA-L) for inflating and checksums.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from isal import isal_zlib

from flambeau.images.native import kernel as native
from flambeau.images.pixels import MAX_PIXELS, Pixels

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# 8 bits without palette and alpha, deflated, not interlaced, after width and height in the header.
_CHANNELS_OF = {b"\x08\x00\x00\x00\x00": 1, b"\x08\x02\x00\x00\x00": 3}
_INDICES = {b"\x08\x00\x00\x00\x00": 1, b"\x08\x03\x00\x00\x00": 1}  # grey, or with a palette
# Keywords of texts that hold EXIF or XMP.
_ORIENTATION_TEXTS = (b"Raw profile", b"XML:com.adobe.xmp")
_TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
_MOST_TEXT = 1 << 25  # of the 1 << 26 bytes of text that Pillow allows
# Chunks that do not change the pixels; a palette here is only a suggestion for small screens.
_PLAIN = frozenset(b"PLTE bKGD cHRM gAMA hIST iCCP pHYs sBIT sRGB tIME tEXt IDAT".split())
# Encoders make one for each 8 kB or more; a file may have millions of empty ones.
_MOST_CHUNKS = 1 << 16


class PngHeader(NamedTuple):
    """The header of a common PNG; `pieces`: begin and end of deflated pixels in the file."""

    height: int
    width: int
    channels: int
    pieces: list[tuple[int, int]]


def indices(data: bytes) -> Pixels | None:
    """The levels of a grey PNG of 8 bits, or the indices of one with a palette, (H, W).

    None for other, damaged or too large files, and without a kernel.
    """
    header = read_header(data, kinds=_INDICES)
    if header is None or header.height * header.width > MAX_PIXELS:
        return None
    rows = first_rows(data, header, header.height)
    return None if rows is None else rows[:, :, 0]


def read_header(data: bytes, *, kinds: Mapping[bytes, int] = _CHANNELS_OF) -> PngHeader | None:
    """The header of a PNG of 8 bits, grey or RGB, not interlaced, upright.

    Args:
        kinds: channels by the header's part after width and height.

    Returns:
        None for other or damaged files (all checksums are compared), and without a kernel.
    """
    if not data.startswith(_SIGNATURE) or native.kernel() is None:
        return None
    chunks = [*itertools.islice(_walk(data), _MOST_CHUNKS)]
    names = [name for name, *_ in chunks]
    if names[:1] != [b"IHDR"] or names[-1] != b"IEND" or not {*names[1:-1]} <= _PLAIN:
        return None
    pieces = [(begin, end) for name, begin, end in chunks if name == b"IDAT"]
    one_after_another = b"IDAT" * len(pieces) in b"".join(names)
    if (
        not pieces
        or not one_after_another
        or any(data.startswith(_ORIENTATION_TEXTS, at) for _, at, _ in chunks)
    ):
        return None
    header = data[chunks[0][1] : chunks[0][2]]
    width, height = int.from_bytes(header[:4]), int.from_bytes(header[4:8])
    channels = kinds.get(header[8:])
    if channels is None or not width or not height:
        return None
    return PngHeader(height, width, channels, pieces)


def first_rows(data: bytes, header: PngHeader, rows: int) -> Pixels | None:
    """The upper rows, (rows, width, channels); None if damaged or unfitting."""
    kernel = native.kernel()
    assert kernel is not None
    size = rows * (1 + header.width * header.channels)
    whole = rows == header.height
    inflater = isal_zlib.decompressobj()
    try:
        # One byte more for the whole image: then the end and its checksum are read, and nothing after them.
        inflated = inflater.decompress(
            b"".join(data[begin:end] for begin, end in header.pieces), size + whole
        )
        if len(inflated) != size or (whole and not inflater.eof):
            return None
        pixels = np.empty((rows, header.width, header.channels), np.uint8)
        kernel.png_rows(inflated, pixels)
    except (isal_zlib.error, native.KernelError):  # type: ignore[misc]  # its stub takes the class for an instance
        return None
    return pixels


def without_texts(data: bytes) -> bytes:
    """A PNG without the texts and profiles that do not change how it looks; other files as they are.

    Pillow refuses an image for a profile, XMP or text of more than a megabyte. EXIF and XMP in texts are
    kept, and inflated, because only their compressed size is bounded.
    """
    if not data.startswith(_SIGNATURE) or not any(name in data for name in _TEXTS):
        return data
    parts = [_SIGNATURE]
    at = len(_SIGNATURE)
    while at + 12 <= len(data):
        name = data[at + 4 : at + 8]
        begin = at + 8
        end = begin + int.from_bytes(data[at : at + 4])
        if name not in _TEXTS:
            parts.append(data[at : end + 4])
        elif data.startswith(_ORIENTATION_TEXTS, begin):
            parts.append(_inflated(name, data[begin:end]) or data[at : end + 4])
        at = end + 4
    return b"".join([*parts, data[at:]])


def _inflated(name: bytes, body: bytes) -> bytes | None:
    """A text chunk without compression; None if it has none, or is damaged."""
    keyword, _, rest = body.partition(b"\0")
    plain = b"tEXt" if name == b"zTXt" else name
    head = keyword + b"\0"
    packed = rest[1:]  # after the method of compression
    if name == b"iTXt":
        if rest[:1] != b"\1":
            return None
        language, translated, packed = [*rest[2:].split(b"\0", 2), b"", b""][:3]
        head += b"\0\0" + language + b"\0" + translated + b"\0"
    elif name != b"zTXt":
        return None
    try:
        text = isal_zlib.decompressobj().decompress(packed, _MOST_TEXT)
    except isal_zlib.error:  # type: ignore[misc]  # its stub takes the class for an instance
        return None
    chunk = plain + head + text
    return (len(chunk) - 4).to_bytes(4) + chunk + isal_zlib.crc32(chunk).to_bytes(4)


def _walk(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of the body of each chunk, up to the first damaged one."""
    at = len(_SIGNATURE)
    while at + 12 <= len(data):
        name = data[at + 4 : at + 8]
        begin = at + 8
        end = begin + int.from_bytes(data[at : at + 4])
        if end + 4 > len(data):
            return
        body = memoryview(data)[at + 4 : end]
        if isal_zlib.crc32(body) != int.from_bytes(data[end : end + 4]):
            return
        yield name, begin, end
        if name == b"IEND":
            return
        at = end + 4
