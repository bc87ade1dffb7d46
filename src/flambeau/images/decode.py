"""Image bytes to pixels, all or a part; any error is a DecodeError.

The decoder is chosen by the bytes, never by the file name, and only from FORMATS: Pillow knows some forty
more, one of which (EPS) starts another program. libjpeg-turbo (jpeg/region_decode.py) decodes common JPEGs,
and only the part that is needed; png.py decodes common PNGs; Pillow everything else: correct, but slow.
Of a file with several images (animated GIF, WebP and PNG, TIFF pages, phone MPO) the first one is used.
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from flambeau.errors import DecodeError, UnsupportedImage
from flambeau.images import png, stacked_tiff, tiff
from flambeau.images.channels import is_grey, of_array, of_image, require_color
from flambeau.images.exif_orientation import (
    UPRIGHT,
    info_orientation,
    stored_box,
    swaps_sides,
    turn_upright,
)
from flambeau.images.jpeg.headers import JpegHeader, read_header
from flambeau.images.jpeg.region_decode import (
    SCALES_EIGHTHS,
    decode_by_kernel,
    decode_region,
    scaled,
)
from flambeau.images.native import kernel as native
from flambeau.images.pillow_messages import silence_libtiff, silence_warnings
from flambeau.images.pixels import MAX_CHANNELS, MAX_PIXELS, Box, Pixels
from flambeau.images.png import PngHeader
from flambeau.images.stand_ins import stand_in
from flambeau.images.wide_levels import is_wide, over_white, wide_levels

Stored = bytes | NDArray[Any]
"""An image in a source: a whole file of one of decode.FORMATS, or pixels: (H, W) or (H, W, C), uint8 or
uint16, C 1, 3, 4 (the last one alpha), or a number of channels that are no color; or float32, of any
brightness and without alpha."""

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF")

# Formats that Pillow can scale while it decodes (MPO is a JPEG followed by others).
_SCALABLE = ("JPEG", "MPO")

# Parts of a PNG that may hold its orientation.
_PNG_ORIENTATION = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")


class Picture:
    """An image whose header has been read; pixels, or a part of them, are decoded on demand.

    It is turned upright by its EXIF data or XMP. Transparent parts are laid over white, for which most such
    drawings are made. Grey of 16 bits is scaled (65535 becomes 255), not clipped.

    Args:
        data: a whole file of one of FORMATS, or pixels.

    Raises:
        DecodeError: no image, or more than MAX_PIXELS; later damage is not noticed here.
    """

    def __init__(self, data: Stored, header: JpegHeader | PngHeader | None = None) -> None:
        self._data = data
        self._image: Image.Image | None = None
        if header is None and not isinstance(data, np.ndarray):
            header = native_header(data)
        self._header = header if isinstance(header, JpegHeader) else None
        self._png = header if isinstance(header, PngHeader) else None
        if header is not None:
            self.height, self.width = header.height, header.width
            self._orientation = self._header.orientation if self._header else UPRIGHT
            _check_size(self.width, self.height)
        elif isinstance(data, np.ndarray):
            _check_array(data)
            self.height, self.width = data.shape[:2]
            self._orientation = UPRIGHT
            _check_size(self.width, self.height)
        else:
            with decode_errors():
                self._image = open_file(data)
                if self._image.format == "PNG" and any(name in data for name in _PNG_ORIENTATION):
                    self._image.load()  # they may come after the pixels
                self.width, self.height = self._image.size
                self._orientation = info_orientation(self._image.info)
                if isinstance(self._image, TiffImagePlugin.TiffImageFile):  # Pillow turns it
                    self._orientation = UPRIGHT
                    if _size_is_not_turned_yet(self._image):
                        self.height, self.width = self._image.size
        if swaps_sides(self._orientation):
            self.height, self.width = self.width, self.height

    @property
    def grey(self) -> bool:
        """The file stores no color; a color file of grey pixels is not grey."""
        if (header := self._header or self._png) is not None:
            return header.channels == 1
        if isinstance(self._data, np.ndarray):
            return self._data.ndim == 2 or self._data.shape[2] == 1
        return self._image is not None and is_grey(self._image)

    @property
    def has_more_pages(self) -> bool:
        """It is a TIFF of several pages, of which the first is read."""
        image = self._image
        return isinstance(image, TiffImagePlugin.TiffImageFile) and image.tag_v2.next != 0

    @property
    def wide(self) -> bool:
        """Its levels have 16 bits, all of which `levels` gives."""
        if isinstance(self._data, np.ndarray):
            return bool(self._data.dtype == np.uint16)
        return self._image is not None and is_wide(self._image)

    def levels(self) -> NDArray[np.float32]:
        """A `wide` image's unscaled levels 0 .. 65535, (height, width, 1 or 3); transparent is white."""
        data = self._data
        if not self.wide:
            raise DecodeError("8 bits per level, and the training images have 16")
        if isinstance(data, np.ndarray):
            require_color(data)
            return over_white(data if data.ndim == 3 else data[:, :, None]).astype(np.float32)
        with decode_errors():
            levels = wide_levels(lambda: open_file(data)).astype(np.float32)
        return np.ascontiguousarray(turn_upright(levels, self._orientation))

    def scale_eighths_for(self, height: int, width: int, *, least: int) -> int:
        """The smallest scale at which each side of a part keeps `least` pixels: 1, 2, 4 or 8 eighths.

        8 for all formats but JPEG: no other becomes faster.
        """
        if self._header is None and (self._image is None or self._image.format not in _SCALABLE):
            return 8
        short = min(height, width)
        return next((scale for scale in SCALES_EIGHTHS if short * scale >= 8 * least), 8)

    def pixels(self, box: Box | None = None, *, channels: int, scale_eighths: int = 8) -> Pixels:
        """A part of the image, or all of it.

        Args:
            box: top, left, height and width of the part, at this scale.
            scale_eighths: as from `scale_eighths_for`; sides are rounded up.

        Returns:
            (height, width, channels) uint8, or float32 as given; often a view, also of given pixels. Channels
            other than 1 or 3 must be those given.
        """
        _check_channels(channels)
        if scale_eighths not in SCALES_EIGHTHS:
            raise ValueError(f"scale_eighths must be 1, 2, 4 or 8, got {scale_eighths}")
        height, width = scaled(self.height, scale_eighths), scaled(self.width, scale_eighths)
        box = stored_box(box or (0, 0, height, width), self._orientation, height, width)
        return turn_upright(self._stored(box, channels, scale_eighths), self._orientation)

    def resize_part(
        self,
        box: Box,
        out: Pixels,
        *,
        scale_eighths: int = 8,
        mirror: bool = False,
        cubic: bool = False,
    ) -> bool:
        """Resize a part with antialiasing into `out`, to torch's pixels, by the C kernel.

        False without a kernel with AVX2, for floating-point pixels, and for other channels than 1 or 3.
        """
        kernel = native.kernel()
        if kernel is None or not kernel.uses_avx2:  # without it, torch is faster
            return False
        if out.dtype != np.uint8 or out.shape[2] not in (1, 3):
            return False
        if self._header is not None and self._orientation == UPRIGHT:
            assert isinstance(self._data, bytes)
            if decode_by_kernel(
                self._data,
                self._header,
                box,
                out,
                scale_eighths=scale_eighths,
                resize=True,
                mirror=mirror,
                cubic=cubic,
            ):
                return True
        pixels = self.pixels(box, channels=out.shape[2], scale_eighths=scale_eighths)
        if pixels.strides[1:] != (pixels.shape[2], 1):
            pixels = pixels.copy()
        kernel.resize(pixels, out, mirror=mirror, cubic=cubic)
        return True

    def _stored(self, box: Box, channels: int, scale_eighths: int) -> Pixels:
        top, left, height, width = box
        data, header = self._data, self._header
        if self._png is not None and isinstance(data, bytes):
            rows = png.first_rows(data, self._png, top + height)
            data = data if rows is None else rows  # None: damaged, and Pillow reports how
        if isinstance(data, np.ndarray):
            with decode_errors():
                part = np.asarray(data)[top : top + height, left : left + width]
                return of_array(part, channels)
        if channels not in (1, 3):
            raise DecodeError(f"an image file as {channels} channels")  # see `all_channels`
        if header is not None:
            pixels = decode_region(
                data, header, box, scale_eighths=scale_eighths, channels=channels
            )
            if pixels is not None:
                return pixels
        with decode_errors():
            image = self._image or open_file(data)
            self._image = None  # its pixels are not kept
            if "transparency" in image.info and is_wide(image):
                levels = wide_levels(lambda: open_file(data))[
                    top : top + height, left : left + width
                ]
                # Of color Pillow takes the high byte; it looks for the transparent one among those.
                is_color = levels.shape[2] == 3
                return of_array((levels >> 8).astype(np.uint8) if is_color else levels, channels)
            # A JPEG stores luma: with 'L' the color is not even decoded.
            size = None
            if scale_eighths < 8:
                size = (image.width * scale_eighths // 8, image.height * scale_eighths // 8)
            image.draft("L" if channels == 1 else None, size)
            _load(image)
            pixels = of_image(image, channels)
        if header is not None and pixels.shape[:2] != (
            scaled(header.height, scale_eighths),
            scaled(header.width, scale_eighths),
        ):
            raise DecodeError("the header contradicts itself")
        return pixels[top : top + height, left : left + width]


def size_of(data: Stored) -> tuple[int, int]:
    stack = None if isinstance(data, np.ndarray) else stacked_tiff.read_header(data)
    if stack is not None and stack.has_more_channels:
        return stacked_tiff.upright_size(stack)
    picture = Picture(data)
    return picture.height, picture.width


def native_header(data: bytes) -> JpegHeader | PngHeader | None:
    """The header of a file whose pixels our code decodes; None if Pillow must."""
    return read_header(data) or png.read_header(data)


def decode(data: Stored, *, channels: int, min_side: int | None = None) -> Pixels:
    """The pixels of an image, as described in `Picture`.

    Args:
        min_side: decode a JPEG at the smallest of 1/2, 1/4 or 1/8 of its size at which both sides still have
            this many pixels, which is several times faster. None: the full size.

    Returns:
        (H, W, channels) uint8, contiguous and writable.

    Raises:
        DecodeError: no image, damaged, truncated, more than MAX_PIXELS, or without a defined brightness
            (floating point, integers beyond 16 bits).
    """
    _check_channels(channels)
    if min_side is not None and min_side < 1:
        raise ValueError(f"min_side must be at least 1, got {min_side}")
    picture = Picture(data)
    scale_eighths = 8
    if min_side is not None:
        scale_eighths = picture.scale_eighths_for(picture.height, picture.width, least=min_side)
    pixels = picture.pixels(channels=channels, scale_eighths=scale_eighths)
    if pixels.flags.c_contiguous and pixels.flags.writeable and not isinstance(data, np.ndarray):
        return pixels
    return pixels.copy()


@contextlib.contextmanager
def decode_errors() -> Iterator[None]:
    """Turns any exception into a DecodeError."""
    try:
        yield
    except DecodeError:
        raise
    except Exception as error:
        # Pillow has no common exception: damage raises OSError, SyntaxError, struct.error, KeyError,
        # OverflowError, MemoryError and many more.
        raise DecodeError(_reason(error)) from error


def open_file(data: bytes) -> Image.Image:
    """An image file of FORMATS, opened by Pillow; pixels as in the file."""
    silence_warnings()
    if not data:
        raise DecodeError("the file is empty")
    try:
        image = Image.open(io.BytesIO(png.without_texts(data)), formats=FORMATS)
    except UnidentifiedImageError as error:
        other = stand_in(data)
        if other is None:
            tiff.require_known(data)
            raise
        raise UnsupportedImage(f"this is {other}") from error
    if image.mode == "F":
        raise UnsupportedImage(
            "floating-point pixels have no defined brightness; save it with 8 or 16 bits"
        )
    _check_size(*image.size)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        tiff.require_readable(image.tag_v2)
        silence_libtiff()
    return image


def _load(image: Image.Image) -> None:
    try:
        image.load()
    except Exception as error:
        if not isinstance(image, TiffImagePlugin.TiffImageFile):
            raise
        # Pillow says 'decoder error -2' of a kind that its libtiff does not know, too.
        raise DecodeError(f"{_reason(error)} ({tiff.Kind(image.tag_v2).name})") from error


def _size_is_not_turned_yet(image: TiffImagePlugin.TiffImageFile) -> bool:
    """Whether Pillow swaps its sides only when it decodes it: by XMP; by the tag it has done so already."""
    tag = ExifTags.Base.Orientation
    return (
        "xmp" in image.info and tag not in image.tag_v2 and image.getexif().get(tag) in range(5, 9)
    )


def _check_array(array: NDArray[Any]) -> None:
    channels = array.shape[2] if array.ndim == 3 else 1
    if array.ndim not in (2, 3) or not 1 <= channels <= MAX_CHANNELS:
        raise DecodeError(
            f"an array of shape {array.shape}: pixels are (H, W) or (H, W, C), C at most {MAX_CHANNELS}"
        )
    if array.dtype not in (np.uint8, np.uint16, np.float32):
        raise DecodeError(f"an array of {array.dtype}: pixels are uint8, uint16 or float32")


def _check_channels(channels: int) -> None:
    if not 1 <= channels <= MAX_CHANNELS:
        raise ValueError(f"channels must be from 1 to {MAX_CHANNELS}, got {channels}")


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise DecodeError(f"{width} x {height} pixels are more than {MAX_PIXELS}, the most allowed")
    if width < 1 or height < 1:
        raise DecodeError(f"{width} x {height} pixels: no pixel at all")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "not a JPEG, PNG, WebP, BMP, GIF, TIFF, PPM or AVIF image, or its header is damaged"
    if isinstance(error, Image.DecompressionBombError):
        return f"its pixels are more than {MAX_PIXELS}, the most allowed"
    words = " ".join(str(error).split())[:200]
    return words or type(error).__name__
