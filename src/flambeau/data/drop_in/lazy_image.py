"""A PIL image whose pixels are read when they are first needed, so that only a crop may be decoded."""

import contextlib
import functools
import io
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from flambeau.errors import DecodeError
from flambeau.images.decode import Picture, Stored, decode, native_header
from flambeau.images.exif_orientation import UPRIGHT
from flambeau.images.jpeg.headers import JpegHeader
from flambeau.images.jpeg.soundness import is_sound
from flambeau.images.png import PngHeader

_MODES = ("RGB", "L")


class LazyImage(Image.Image):
    """An image as from `PIL.Image.open` or its `convert`, without pixels until they are needed.

    `open_it` reads the file when a PIL method needs anything in it. `isinstance` and pickle see PIL's class.
    Once its file is closed, PIL raises as always, unless `load` was called before.
    """

    def __init__(
        self,
        picture: Picture,
        mode: str,
        open_it: Callable[[], Image.Image],
        kind: type[Image.Image] = Image.Image,
        stream: Any = None,
    ) -> None:
        self._pixels: Any = None
        self._kind = kind
        self.filename: Any = ""
        super().__init__()
        del self.info
        self.format, self.format_description = kind.format, kind.format_description
        self.picture, self._open_it = picture, open_it
        self._mode = mode
        self._size = (picture.width, picture.height)
        self._stream = stream
        self._is_closed = False
        self._is_loaded = False

    @property  # type: ignore[misc]
    def __class__(self) -> type[Image.Image]:  # type: ignore[override]
        return self._kind

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled and deep-copied as PIL's class."""
        if not self._has_file:
            return super().copy().__reduce_ex__(protocol)
        if self._pixels is not None:
            self._opened.load()
            self._opened.im = self._pixels
        return self._opened.__reduce_ex__(protocol)

    def __getattr__(self, name: str) -> Any:
        """Attributes of PIL's class for the format, such as `info`."""
        if name.startswith("__") or "_open_it" not in vars(self):
            raise AttributeError(name)
        return getattr(self._opened, name)

    @functools.cached_property
    def _opened(self) -> Image.Image:
        opened = self._open_it()
        if self._is_loaded:
            opened.load()
        elif self._is_closed:
            opened.__exit__()
        elif self._has_lost_its_file:
            opened.fp = self._stream  # type: ignore[attr-defined]
        return opened

    @property
    def _has_lost_its_file(self) -> bool:
        if self._is_loaded:
            return False
        return self._is_closed or getattr(self._stream, "closed", False)

    @property
    def is_left_to_pil(self) -> bool:
        """Whether somebody may have changed the pixels, or has closed the file."""
        return self._pixels is not None or self._has_lost_its_file

    @property
    def _has_file(self) -> bool:
        """Whether it stands for an opened file; what `convert` and `copy` return does not."""
        return self._kind is not Image.Image

    def __exit__(self, *args: object) -> None:
        if self._has_file:
            self._is_closed = True
            if "_opened" in vars(self):
                self._opened.__exit__(*args)

    def verify(self) -> None:
        """As PIL's, after which an opened image cannot be read."""
        if self._has_file and self._pixels is None:
            self._opened.verify()
            self._is_closed = True

    def seek(self, frame: int) -> None:
        """As PIL's; there is one frame."""
        if self._has_file:
            self._opened.seek(frame)
        else:
            super().seek(frame)

    @property
    def _im(self) -> Any:
        if self._pixels is None and "_open_it" in vars(self):
            self._pixels = self._opened.convert(self._mode).im
        return self._pixels

    @_im.setter
    def _im(self, value: Any) -> None:
        self._pixels = value

    def load(self) -> Any:
        """PIL's access to single pixels; nothing is decoded before it is used.

        From here on neither PIL's image nor this one needs the file.
        """
        if self.is_left_to_pil:
            return super().load()
        self._is_loaded = True
        return _LazyPixels(self)

    def convert(self, mode: str | None = None, *args: Any, **settings: Any) -> Image.Image:
        """As PIL's; to the same mode, and from grey to RGB, without decoding."""
        if self.is_left_to_pil or args or settings or mode not in _MODES:
            return super().convert(mode, *args, **settings)
        if mode != self._mode and self._mode == "RGB":  # PIL computes luma from RGB, not the file's
            return super().convert(mode)
        converted = LazyImage(self.picture, mode, self._open_it)
        if {"info", "_opened"} & vars(self).keys():  # somebody may have written into it
            converted.info = self.info.copy()
        return converted

    def draft(self, mode: str | None, size: Any) -> Any:
        """As PIL's, for `thumbnail`: a JPEG just opened is decoded at 1/2, 1/4 or 1/8 of its size."""
        if self.is_left_to_pil or self.format is None:
            return None
        drafted = self._opened.draft(mode, size)
        if drafted is not None:
            self._mode, self._size = self._opened.mode, self._opened.size
            self._pixels = self._opened.convert(self._mode).im
        return drafted

    def copy(self) -> Image.Image:
        """As PIL's, without decoding."""
        return super().copy() if self.is_left_to_pil else self.convert(self._mode)


class _LazyPixels:
    def __init__(self, image: LazyImage) -> None:
        self._image = image

    def __getattr__(self, name: str) -> Any:
        return getattr(self._access(), name)

    def __getitem__(self, xy: Any) -> Any:
        return self._access()[xy]

    def __setitem__(self, xy: Any, value: Any) -> None:
        self._access()[xy] = value

    def _access(self) -> Any:
        assert self._image.im is not None
        return Image.Image.load(self._image)


def open_lazily(
    opener: Any, fp: Any, stored: Stored | None = None, formats: Any = None
) -> Image.Image:
    """What `PIL.Image.open` returns for `fp` or `stored`, or a LazyImage of the same pixels."""
    data = _read(fp) if stored is None else stored
    if not isinstance(data, bytes):
        pixels = data[:, :, 0] if data.ndim == 3 and data.shape[2] == 1 else data
        if pixels.dtype != np.uint8 or pixels.shape[2:] not in ((), (3,)):
            return Image.fromarray(pixels)
        picture = Picture(data)
        return LazyImage(picture, _mode_of(picture), lambda: Image.fromarray(pixels))
    header = native_header(data)
    kind = None if header is None else _kind_of(data, header)
    if header is not None and kind is not None and _is_wanted(kind, formats):
        with contextlib.suppress(DecodeError):  # too large for our decoder: PIL has its own limit
            picture = Picture(data, header)
            if picture.height * picture.width <= (Image.MAX_IMAGE_PIXELS or math.inf):
                stream = fp if stored is None and hasattr(fp, "read") else None
                image = LazyImage(
                    picture, _mode_of(picture), lambda: opener(io.BytesIO(data)), kind, stream
                )
                image.filename = _name_of(fp)
                return image
    is_readable_again = stored is None and (not hasattr(fp, "read") or _is_seekable(fp))
    opened: Image.Image = opener(fp if is_readable_again else io.BytesIO(data), "r", formats)
    return opened


def open_upright(data: Stored) -> Image.Image:
    """An RGB image, upright as `Picture` turns it, of a whole file or of pixels.

    DecodeError: damaged, also where no transform will look.
    """

    def decoded() -> Image.Image:
        return Image.fromarray(decode(data, channels=3))

    header = native_header(data) if isinstance(data, bytes) else None
    if header is None or (isinstance(header, JpegHeader) and not is_sound(bytes(data), header)):
        return decoded()
    return LazyImage(Picture(data, header), "RGB", decoded)


def _kind_of(
    data: bytes, header: JpegHeader | PngHeader
) -> type[JpegImageFile] | type[PngImageFile] | None:
    """PIL's class for the format, if our decoder gives PIL's pixels.

    A damaged file is left to PIL: it fails in `convert`, where data sets catch the error; ours fails later.
    The checksums of a PNG have been compared by then.
    """
    if isinstance(header, PngHeader):
        return PngImageFile
    # PIL does not apply the EXIF orientation; our decoder does. Of an MPO it has all images.
    is_plain = header.orientation == UPRIGHT and data.find(b"MPF\0", 0, header.scan_at) < 0
    return JpegImageFile if is_plain and is_sound(data, header) else None


def _is_wanted(kind: type[Image.Image], formats: Any) -> bool:
    """Whether the format is among those that the user names, in PIL's way; all are without any."""
    if formats is None:
        return True
    are_names = isinstance(formats, list | tuple) and all(isinstance(one, str) for one in formats)
    return are_names and kind.format in (one.upper() for one in formats)


def _read(fp: Any) -> bytes:
    if hasattr(fp, "read"):
        _is_seekable(fp)
        data: bytes = fp.read()
        return data
    with open(fp, "rb") as file:  # noqa: PTH123  whatever PIL takes
        return file.read()


def _is_seekable(stream: Any) -> bool:
    """Whether PIL, which starts at 0, can read what has been read of it."""
    try:
        stream.seek(0)
    except (AttributeError, OSError):
        return False
    return True


def _name_of(fp: Any) -> Any:
    return os.fspath(fp) if isinstance(fp, str | bytes | os.PathLike) else ""


def _mode_of(picture: Picture) -> str:
    return "L" if picture.grey else "RGB"
