"""TIFF files: the kinds that Pillow refuses, or reads as other pixels than are in them, by name.

Source: TIFF 6.0; found by comparison with tifffile over kinds of color, depth, layout and compression.
"""

import io
import struct
from collections.abc import Iterator

from PIL import Image
from PIL.TiffImagePlugin import COMPRESSION_INFO, PREFIXES, TiffImageFile
from PIL.TiffImagePlugin import ImageFileDirectory_v2 as Tags

from flambeau.errors import UnsupportedImage

DAMAGED = (SyntaxError, OSError, ValueError, TypeError, LookupError, ArithmeticError, struct.error)
"""What Pillow and `Kind` raise for tags that are cut off or of other types than TIFF has."""

# Numbers of tags.
_WIDTH, _HEIGHT = 256, 257
_BITS, _COMPRESSION, _COLOR, _FILL_ORDER = 258, 259, 262, 266
_SAMPLES, _LAYOUT, _COLOR_TABLE, _INK_SET = 277, 284, 320, 332
_EXTRA_SAMPLES, _NUMBERS, _SUBSAMPLING = 338, 339, 530

_WHITE_IS_ZERO, _GREY, _RGB, _PALETTE, _CMYK, _YCBCR, _CIELAB = 0, 1, 2, 3, 5, 6, 8
_COLORS = {
    _WHITE_IS_ZERO: "grey (WhiteIsZero)",
    _GREY: "grey",
    _RGB: "RGB",
    _PALETTE: "palette",
    4: "transparency mask",
    _CMYK: "CMYK",
    _YCBCR: "YCbCr",
    _CIELAB: "CIELab",
    9: "ICCLab",
    10: "ITULab",
    32803: "CFA (raw)",
    34892: "LinearRaw",
}
_COLOR_SAMPLES = {_RGB: 3, _CMYK: 4, _YCBCR: 3, _CIELAB: 3, 9: 3, 10: 3, 34892: 3}
_COMPRESSIONS = {
    **{number: name.removeprefix("tiff_") for number, name in COMPRESSION_INFO.items()},
    34712: "JPEG 2000",
    34887: "LERC",
    34892: "lossy JPEG",
    22610: "JPEG XR",
    34934: "JPEG XR",
    34933: "PNG",
    50002: "JPEG XL",
    52546: "JPEG XL",
}
_EXTRAS = {0: "of unknown meaning", 1: "associated alpha", 2: "alpha", 999: "alpha"}
_ALPHA = (1, 2, 999)
_SIGNED, _FLOATING = 2, 3
_NUMBER_KINDS = range(1, 7)
_SEPARATE = 2


class Kind:
    """What the tags of a TIFF's first page say about its pixels."""

    def __init__(self, tags: Tags) -> None:
        self.color = int(tags.get(_COLOR, _WHITE_IS_ZERO))
        self.bits = tuple(map(int, tags.get(_BITS, (1,))))
        self.samples = int(tags.get(_SAMPLES, len(self.bits)))
        self.extras = tuple(map(int, tags.get(_EXTRA_SAMPLES, ())))
        self.numbers = max(map(int, tags.get(_NUMBERS, (1,))))
        self.is_separate = tags.get(_LAYOUT, 1) == _SEPARATE and self.samples > 1
        self.compression = int(tags.get(_COMPRESSION, 1))
        self.bits_are_reversed = tags.get(_FILL_ORDER, 1) == 2
        self.no_cmyk = self.color == _CMYK and tags.get(_INK_SET, 1) != 1
        # Two by two where it is not given.
        self.is_subsampled = self.color == _YCBCR and tags.get(_SUBSAMPLING) != (1, 1)
        table = tags.get(_COLOR_TABLE, ()) if self.color == _PALETTE else ()
        self.table_has_8_bits = bool(table) and 0 < max(table) < 256

    @property
    def is_misread(self) -> bool:
        """Whether Pillow gives other pixels than are in the file, without an error."""
        depth = max(self.bits)
        is_grey = self.color in (_WHITE_IS_ZERO, _GREY, _PALETTE)
        return any(
            (
                self.color == _WHITE_IS_ZERO and depth > 8,
                self.color == _CIELAB or self.no_cmyk or self.table_has_8_bits,
                self.numbers == _SIGNED and depth <= 8,
                self.has_more_channels,
                self.is_subsampled and self.compression == 1 and self.samples > 1,
                self.is_separate and is_grey,
                self.is_separate and depth > 8 and self.compression == 1,
            )
        )

    @property
    def has_more_channels(self) -> bool:
        """Whether it has samples beside grey or color, and more than an alpha."""
        spare = self.samples - _COLOR_SAMPLES.get(self.color, 1)
        is_color_and_alpha = spare == 1 and self.extras[:1] and self.extras[0] in _ALPHA
        # Without the tag Pillow takes a fourth channel for alpha, but near infrared is as likely.
        return spare > 0 and not is_color_and_alpha

    @property
    def is_known(self) -> bool:
        """Whether TIFF defines such a file; otherwise its tags are damaged."""
        has_depth = all(0 < bits <= 128 for bits in self.bits)
        return self.color in _COLORS and self.numbers in _NUMBER_KINDS and has_depth

    @property
    def name(self) -> str:
        return f"a TIFF of {', '.join(self._words())}"

    @property
    def refusal(self) -> str:
        return f"{self.name} is not read here; save it as PNG, grey or RGB"

    def _words(self) -> Iterator[str]:
        yield _COLORS.get(self.color, f"color {self.color}")
        signs = {_SIGNED: " signed", _FLOATING: " floating-point"}
        depths = sorted({*self.bits})
        bits = " and ".join(map(str, depths))
        yield f"{bits}{signs.get(self.numbers, '')} bit{'s' if depths != [1] else ''}"
        if self.samples > 1:
            yield f"{self.samples} samples per pixel"
        for extra in dict.fromkeys(self.extras):
            yield f"an extra sample {_EXTRAS.get(extra, f'{extra}')}"
        if self.is_separate:
            yield "in separate planes"
        if self.is_subsampled:
            yield "subsampled"
        if self.no_cmyk:
            yield "inks that are not CMYK"
        if self.table_has_8_bits:
            yield "a color table of 8 bits"
        if self.bits_are_reversed:
            yield "bits reversed"
        if self.compression != 1:
            yield f"compressed by {_COMPRESSIONS.get(self.compression, f'method {self.compression}')}"


def white_level(image: Image.Image) -> int:
    """The greatest level beyond 8 bits; Pillow gives 12 bits as 16, unscaled."""
    if isinstance(image, TiffImageFile) and max(Kind(image.tag_v2).bits) == 12:
        return 4095
    return 65535


def require_readable(tags: Tags) -> None:
    """UnsupportedImage if Pillow would give other pixels than are in the file."""
    kind = Kind(tags)
    if kind.is_misread:
        raise UnsupportedImage(kind.refusal)


def require_known(data: bytes) -> None:
    """UnsupportedImage for a TIFF of a defined kind that Pillow does not open."""
    if not data.startswith(tuple(PREFIXES)):
        return
    if data.startswith(b"MM\0\x2b"):
        raise UnsupportedImage(
            "a BigTIFF with its high bytes first is not read here; save it as PNG"
        )
    try:
        tags = first_page(data)
        kind = Kind(tags)
    except DAMAGED:
        return
    if kind.is_known and _WIDTH in tags and _HEIGHT in tags:
        raise UnsupportedImage(kind.refusal)


def first_page(data: bytes) -> Tags:
    """The tags of the first page of a whole file; one of DAMAGED if they cannot be read."""
    tags = Tags(data[:16] if data[2] == 43 else data[:8])  # the version of BigTIFF
    file = io.BytesIO(data)
    file.seek(tags.next)
    tags.load(file)
    return tags
