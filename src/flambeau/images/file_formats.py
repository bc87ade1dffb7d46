"""The format of an image file by its first bytes, and the endings of its name."""

from PIL.TiffImagePlugin import PREFIXES

_FORMATS = (
    ("JPEG", (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"), (b"\xff\xd8\xff",)),
    ("PNG", (".png", ".apng"), (b"\x89PNG",)),
    ("GIF", (".gif",), (b"GIF8",)),
    ("BMP", (".bmp",), (b"BM",)),
    ("WebP", (".webp",), (b"RIFF",)),
    # Also for BigTIFF, and for writers that confuse the order of two bytes; Pillow reads them all.
    ("TIFF", (".tif", ".tiff"), tuple(PREFIXES)),
    ("PPM", (".ppm", ".pgm", ".pbm", ".pnm"), tuple(b"P%d" % digit for digit in range(1, 7))),
    ("AVIF", (".avif", ".avifs"), ()),
)
_AVIF = (b"ftypavif", b"ftypavis")  # after the length of the first box
ENDINGS = {name: endings for name, endings, _ in _FORMATS}
"""The endings of the files of a format, the preferred one first."""


def format_of(data: bytes) -> str:
    """The name of the format of a file, by its first bytes; '' for none of ENDINGS."""
    if data[4:12] in _AVIF:
        return "AVIF"
    return next((name for name, _, magics in _FORMATS if data.startswith(magics)), "")
