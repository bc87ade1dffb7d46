"""Image bytes to pixels with Pillow; whatever is wrong with them is one exception.

用 Pillow 把图像字节解码成像素；无论哪里出错，都只抛出一种异常。

Source: own. EXIF orientation: EXIF 2.32 (CIPA DC-008), section 4.6.4 A, tag 0x0112.

The decoder is picked by the bytes, never by the file name, and only from FORMATS: Pillow knows some forty
more, one of which (EPS) starts another program.
Of a file with several images (animated GIF, WebP and PNG, TIFF pages, phone MPO) the first one counts.
"""

import io
import re
import warnings
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

Pixels = NDArray[np.uint8]

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

# From this size on Pillow warns of a 'decompression bomb' (a quarter of a GiB as RGB); here it is refused.
MAX_PIXELS = 89_478_485

# Damaged metadata (EXIF, TIFF tags, MPO index) beside pixels that are fine: the pixels are what counts.
# In the form of warnings.filters, so that its presence is quickly seen.
_PILLOW_METADATA = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)

_UPRIGHT = {  # EXIF orientation -> what turns the stored image upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class DecodeError(ValueError):
    """These bytes are no image that can be used; the message is the reason, without a path."""


class ImageInfo(NamedTuple):
    """What the header of an image says, upright.

    Attributes:
        height: pixels, at least 1.
        width: pixels, at least 1.
        grey: the file stores no colour; a colour file of grey pixels does not count.
    """

    height: int
    width: int
    grey: bool


def decode(data: bytes, *, channels: int, min_side: int | None = None) -> Pixels:
    """The pixels of an encoded image.

    The image is turned upright after its EXIF orientation.
    Transparent parts are laid over white: what a file stores below full transparency is arbitrary, so it
    must not show, and most drawings with transparency are made for a light page.
    Grey of 16 bits is scaled (65535 becomes 255), not clipped.

    Args:
        data: a whole file of one of FORMATS.
        channels: 1 for grey (ITU-R 601 luma), 3 for RGB.
        min_side: allow a JPEG to be decoded at 1/2, 1/4 or 1/8 of its size, the smallest at which both
            sides still have this many pixels; this is several times faster. None: always the full size.

    Returns:
        (H, W, channels) uint8, contiguous and writable.

    Raises:
        DecodeError: not an image, damaged, cut short, more than MAX_PIXELS, or pixels without a defined
            brightness (floating point, 32-bit integers beyond 16 bits).

    Example:
        >>> decode(b"P5 3 2 255 abcdef", channels=1)[:, :, 0].tolist()
        [[97, 98, 99], [100, 101, 102]]
        >>> decode(b"", channels=1)
        Traceback (most recent call last):
        flambeau.data.decode.DecodeError: the file is empty
    """
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if min_side is not None and min_side < 1:
        raise ValueError(f"min_side must be at least 1, got {min_side}")
    try:
        with _open(data) as image:
            # Luma is stored as such in a JPEG: with 'L' the colour is not even decoded.
            image.draft("L" if channels == 1 else None, (min_side, min_side) if min_side else None)
            image.load()
            upright = _UPRIGHT.get(_orientation(image))
            plain = _without_alpha(_of_8_bits(image))
            plain = _in_mode(plain, "L" if channels == 1 else "RGB")
            pixels = np.array(plain if upright is None else plain.transpose(upright))
    except DecodeError:
        raise
    except Exception as error:
        # Pillow has no common exception: damage shows as OSError, SyntaxError, struct.error, KeyError,
        # OverflowError, MemoryError and many more.
        raise DecodeError(_reason(error)) from error
    return pixels.reshape(*pixels.shape[:2], channels)


def inspect(data: bytes) -> ImageInfo:
    """What the header of an encoded image says; its pixels are not decoded.

    Args:
        data: a whole file of one of FORMATS, or at least its header.

    Returns:
        Its ImageInfo. Damage behind the header goes unnoticed.

    Raises:
        DecodeError: as `decode`, as far as the header shows it.

    Example:
        >>> inspect(b"P5 3 2 255 abcdef")
        ImageInfo(height=2, width=3, grey=True)
    """
    try:
        with _open(data) as image:
            width, height = image.size
            if _orientation(image) >= 5:  # these four swap rows and columns
                width, height = height, width
            return ImageInfo(height, width, _is_grey(image))
    except DecodeError:
        raise
    except Exception as error:  # as in `decode`
        raise DecodeError(_reason(error)) from error


def _open(data: bytes) -> Image.Image:
    _ignore_metadata_warnings()
    if not data:
        raise DecodeError("the file is empty")
    image = Image.open(io.BytesIO(data), formats=FORMATS)
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DecodeError(f"{width} x {height} pixels are more than {MAX_PIXELS}, the most allowed")
    if width < 1 or height < 1:
        raise DecodeError(f"{width} x {height} pixels: no pixel at all")
    return image


def _ignore_metadata_warnings() -> None:
    """Let Pillow pass over damaged metadata in silence.

    Not `warnings.catch_warnings` around each image: it is not safe in threads, and it makes every other
    warning that Python shows once appear again after each image.
    """
    if _PILLOW_METADATA not in warnings.filters:
        warnings.filterwarnings("ignore", category=UserWarning, module=_PILLOW_METADATA[3].pattern)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation; 1, upright, where there is none or it is damaged, or of a TIFF (Pillow turns it).

    Read by hand: Pillow reads all of EXIF for it, slowly, and fails where another tag is damaged.
    """
    tiff = bytes(image.info.get("exif", b"")).removeprefix(b"Exif\0\0")
    orders: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
    if tiff[:4] not in orders:
        return 1

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], orders[tiff[:4]])

    first = number(4, 4) + 2
    last = min(first + 12 * number(first - 2, 2), len(tiff) - 11)
    for entry in range(first, last, 12):
        if number(entry, 2) == 0x0112:
            return number(entry + 8, 2)
    return 1


def _of_8_bits(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise DecodeError(
            "floating-point pixels have no defined brightness; save it with 8 or 16 bits"
        )
    if not image.mode.startswith("I"):
        return image
    levels = np.asarray(image).astype(np.int64)
    if levels.min() < 0 or levels.max() > 65535:
        raise DecodeError(
            "32-bit pixels beyond 0 .. 65535 have no defined brightness; save 8 or 16 bits"
        )
    return Image.fromarray(((levels * 255 + 32767) // 65535).astype(np.uint8))


def _without_alpha(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))


def _in_mode(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode:
        return image
    # By way of RGB, to which Pillow converts every mode; grey comes out of it as it went in.
    return image.convert("RGB") if mode == "RGB" else image.convert("RGB").convert(mode)


def _is_grey(image: Image.Image) -> bool:
    if image.mode != "P" or image.palette is None:
        return image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I")
    mode, palette = image.palette.getdata()  # RGB, RGBA, or BGRX of a BMP
    colours = np.frombuffer(palette, np.uint8)
    colours = colours[: len(palette) // len(mode) * len(mode)].reshape(-1, len(mode))
    return bool((colours[:, :3] == colours[:, :1]).all())


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not a JPEG, PNG, WebP, BMP, GIF, TIFF or PPM image, or its header is damaged"
    words = " ".join(str(error).split())[:200]
    return words or type(error).__name__
