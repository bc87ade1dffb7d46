"""A PIL image that is decoded when somebody looks at its pixels, so that a crop may be decoded alone."""

import functools
import io
from pathlib import Path
from typing import Any

from PIL import Image

from flambeau.data.images.decode import Picture
from flambeau.data.images.exif_orientation import UPRIGHT
from flambeau.data.images.jpeg.headers import read_header

_MODES = ("RGB", "L")
_JPEG = b"\xff\xd8\xff"


class LazyImage(Image.Image):
    """A JPEG as `PIL.Image.open` or its `convert` would give it, without pixels until they are needed.

    Every method of PIL's that needs pixels, or what else is in the file, finds it: PIL itself reads it then.

    Args:
        data: the file.
        picture: our reading of its header.
        mode: 'RGB' or 'L', to which it is converted.
        opener: PIL's `open`.

    Attributes:
        data: the file.
        picture: our reading of its header.
    """

    def __init__(self, data: bytes, picture: Picture, mode: str, opener: Any) -> None:
        self._pixels: Any = None
        super().__init__()
        del self.info
        self.data, self.picture, self._opener = data, picture, opener
        self._mode, self._size = mode, (picture.width, picture.height)
        self.format = "JPEG" if mode == _mode_of(picture) else None

    def __getattr__(self, name: str) -> Any:
        """What PIL's class for JPEG would have: `info` and others."""
        if name.startswith("__") or "_opener" not in vars(self):
            raise AttributeError(name)
        return getattr(self._opened, name)

    @functools.cached_property
    def _opened(self) -> Image.Image:
        opened: Image.Image = self._opener(io.BytesIO(self.data))
        return opened

    @property
    def is_decoded(self) -> bool:
        """Whether somebody has looked at the pixels, and may have changed them."""
        return self._pixels is not None

    @property
    def _im(self) -> Any:
        if self._pixels is None and "_opener" in vars(self):
            self._pixels = self._opened.convert(self._mode).im
        return self._pixels

    @_im.setter
    def _im(self, value: Any) -> None:
        self._pixels = value

    def load(self) -> Any:
        """What changes single pixels; as long as nobody does, nothing is decoded."""
        return super().load() if self.is_decoded else _LazyPixels(self)

    def convert(self, mode: str | None = None, *args: Any, **settings: Any) -> Image.Image:
        """As PIL's; to the same mode, and from grey to RGB, without decoding."""
        if self.is_decoded or args or settings or mode not in _MODES:
            return super().convert(mode, *args, **settings)
        if mode != self._mode and self._mode == "RGB":  # PIL makes luma of RGB, not of the file's
            return super().convert(mode)
        return LazyImage(self.data, self.picture, mode, self._opener)

    def copy(self) -> Image.Image:
        """As PIL's, without decoding."""
        return super().copy() if self.is_decoded else self.convert(self._mode)


class _LazyPixels:
    """PIL's access to single pixels."""

    def __init__(self, image: LazyImage) -> None:
        self._image = image

    def __getattr__(self, name: str) -> Any:
        return getattr(self._access(), name)

    def __getitem__(self, place: Any) -> Any:
        return self._access()[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._access()[place] = value

    def _access(self) -> Any:
        assert self._image.im is not None
        return Image.Image.load(self._image)


def opened_lazily(opener: Any, fp: Any, mode: str = "r", formats: Any = None) -> Image.Image:
    """What `PIL.Image.open` gives, or a LazyImage where our decoder gives the same pixels.

    Args:
        opener: PIL's function.
        fp, mode, formats: of the call.
    """
    if isinstance(fp, str | bytes | Path) or not hasattr(fp, "read"):
        with open(fp, "rb") as file:  # noqa: PTH123  whatever PIL takes
            data = file.read()
    else:
        data = fp.read()
    if formats is None and data.startswith(_JPEG):
        header = read_header(data)
        # PIL leaves a picture that lies on its side as it is; our decoder turns it.
        if header is not None and header.orientation == UPRIGHT and header.channels in (1, 3):
            picture = Picture(data)
            return LazyImage(data, picture, _mode_of(picture), opener)
    opened: Image.Image = opener(io.BytesIO(data), mode, formats)
    return opened


def _mode_of(picture: Picture) -> str:
    return "L" if picture.grey else "RGB"
