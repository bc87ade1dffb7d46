"""The conversion of one image that `flambeau pack` writes into a packed file.

The geometry is that of MXNet 1.9.1 `tools/im2rec.py` (center crop, then the shorter side, the
other one rounded down), with antialiasing, and without enlarging.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import PREFIXES

from flambeau.data.sources.masks.mask_file import Mask
from flambeau.images.all_channels import all_channels, stored_channels
from flambeau.images.decode import Picture, Stored, decode
from flambeau.images.file_formats import ENDINGS, format_of
from flambeau.images.jpeg.scan_segments import CannotSegment, segment
from flambeau.images.pixels import Pixels

_FORMATS = {"jpeg": "JPEG", "png": "PNG", "webp": "WebP", "bmp": "BMP"}


class CannotStore(ValueError):
    """An undamaged image that cannot be stored as requested, and why, without a path."""


class Layout(NamedTuple):
    """The common shape, (H, W) or (H, W, C), and dtype of all images of an array."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, image: Stored) -> "Layout":
        assert not isinstance(image, bytes)
        return cls(image.shape, str(image.dtype))


@dataclass(frozen=True)
class Conversion:
    """How each image is stored.

    Attributes:
        encode: keep, jpeg, png, webp, bmp or raw. 'keep' keeps a file's bytes, and makes a PNG of pixels;
            'raw' stores pixels.
        resize: pixels of the shorter side, of larger images.
        quality: of a JPEG or a WebP, 1 to 100.
        keep_small: with `resize`, an image that keeps its size keeps its bytes.
        segments: JPEGs whose parts can be decoded alone (images/jpeg/scan_segments.py).
        channels: of raw pixels, 1 or 3; None: those of the image.
    """

    encode: str = "keep"
    resize: int | None = None
    quality: int = 95
    center_crop: bool = False
    keep_small: bool = False
    segments: bool = False
    channels: int | None = None

    def convert(self, stored: Stored) -> Stored:
        if (channels := no_color(stored)) is not None:
            return self._with_all_channels(stored, channels)
        picture = Picture(stored)
        size = self.size(picture.height, picture.width)
        if size == (picture.height, picture.width):
            if not isinstance(stored, bytes):
                if self.encode == "raw" and self.channels is None:
                    return stored
            elif self.encode == "keep" or self.keep_small:
                return self._segmented(stored)
        channels = self.channels or (1 if picture.grey else 3)
        pixels = decode(stored, channels=channels, min_side=self.resize and 2 * self.resize)
        pixels = _resized(_square(pixels) if self.center_crop else pixels, size)
        if self.encode == "raw":
            return pixels[:, :, 0] if channels == 1 else pixels
        try:
            data = self._encoded(pixels)
        except MemoryError:
            raise
        except Exception as error:
            # Encoders have no common exception: ValueError for a side that is too long, OSError ...
            what = f"{size[1]} x {size[0]} pixels cannot become {_FORMATS[self._file_format]}"
            raise CannotStore(f"{what}: {error}") from error
        return self._segmented(data)

    def _with_all_channels(self, stored: Stored, channels: int) -> Stored:
        """An image of channels that are no color, which no format of `_FORMATS` holds and nothing resizes."""
        pixels = all_channels(stored, channels)
        if self.size(*pixels.shape[:2]) == pixels.shape[:2]:
            if self.encode == "raw":
                return pixels
            if isinstance(stored, bytes) and (self.encode == "keep" or self.keep_small):
                return stored
        raise CannotStore(
            f"its {channels} channels are no color: files are kept as they are, without --encode, --resize "
            "and --center-crop, and pixels with --encode raw"
        )

    def convert_mask(self, mask: Mask) -> bytes:
        """The mask of an image, (H, W) uint8, at its size after `convert`; a PNG."""
        height, width = self.size(*mask.shape)
        if self.center_crop:
            mask = _square(mask)
        image = Image.fromarray(np.ascontiguousarray(mask))
        target = io.BytesIO()
        image.resize((width, height), Image.Resampling.NEAREST).save(target, "png")
        return target.getvalue()

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width, in pixels, of the stored image."""
        if self.center_crop:
            height = width = min(height, width)
        short = min(height, width)
        if self.resize is None or short <= self.resize:
            return height, width
        return height * self.resize // short, width * self.resize // short

    @property
    def _file_format(self) -> str:
        return "png" if self.encode == "keep" else self.encode

    def _encoded(self, pixels: Pixels) -> bytes:
        is_grey = pixels.shape[2] == 1
        if self.encode == "jpeg":
            # Not by Pillow, which holds the GIL while it encodes into memory.
            # Full color resolution from quality 90 on, where no loss should be visible.
            color = "Gray" if is_grey else "444" if self.quality >= 90 else "420"
            space = "GRAY" if is_grey else "RGB"
            return bytes(simplejpeg.encode_jpeg(pixels, self.quality, space, color))
        kind = self._file_format
        options: dict[str, Any] = {"quality": self.quality} if kind == "webp" else {}
        target = io.BytesIO()
        Image.fromarray(pixels[:, :, 0] if is_grey else pixels).save(target, kind, **options)
        return target.getvalue()

    def _segmented(self, data: bytes) -> bytes:
        if not self.segments or suffix_of(data) != ".jpg":
            return data
        try:
            return segment(data)
        except CannotSegment:  # CMYK, damage that decoders ignore: any reader accepts it as it is
            return data


def layout_of(stored: Stored, how: Conversion) -> Layout:
    """Shape and type of an image as raw pixels, by its header; DecodeError if that is damaged."""
    if (channels := no_color(stored)) is not None:
        return Layout.of(all_channels(stored, channels))
    picture = Picture(stored)
    size = how.size(picture.height, picture.width)
    if isinstance(stored, np.ndarray) and size == (picture.height, picture.width):
        return Layout.of(stored)
    return Layout(size if picture.grey else (*size, 3), "uint8")


def common_layout(layouts: Sequence[Layout]) -> tuple[Layout, int | None] | None:
    """The layout for all images, if of one size, and the channels to convert to, if any."""
    if len(set(layouts)) == 1:
        return layouts[0], None
    if len({layout.shape[:2] for layout in layouts}) > 1:
        return None
    size = layouts[0].shape[:2]
    if all(layout.shape[2:] in ((), (1,)) for layout in layouts):
        return Layout(size, "uint8"), 1
    return Layout((*size, 3), "uint8"), 3


def no_color(stored: Stored) -> int | None:
    """An image's number of channels, if no color; DecodeError if its header is damaged."""
    if isinstance(stored, bytes) and not stored.startswith(tuple(PREFIXES)):
        return None
    found = stored_channels(stored)
    return found.channels if found.are_no_color else None


def suffix_of(data: bytes) -> str:
    """The usual file ending for an image file, by its first bytes."""
    return ENDINGS[format_of(data) or "PPM"][0]


def _square(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = pixels.shape[:2]
    side = min(height, width)
    top = (height - side) // 2
    left = (width - side) // 2
    return pixels[top : top + side, left : left + side]


def _resized(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    """Bicubic with antialiasing."""
    if pixels.shape[:2] == size:
        return np.ascontiguousarray(pixels)
    planes: NDArray[Any] = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels
    image = Image.fromarray(np.ascontiguousarray(planes))
    resized = np.asarray(image.resize(size[::-1], Image.Resampling.BICUBIC))
    return resized.reshape(*size, pixels.shape[2])
