"""The C kernel beside this file, if it was built; everything works without it, only slower.

Its sources are the C files in this folder; hatch_build.py compiles them.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.errors import InputError
from flambeau.images.pixels import Box, Pixels

LIBRARY = Path(__file__).with_name("_kernel.so")

# The expected result of flambeau_interface(): a library left over from another version is not used.
_INTERFACE = 7

# The codes of jpeg.h.
BAD_HEADER, UNSUPPORTED, DAMAGED, BAD_BOX, NO_MEMORY = -1, -2, -3, -4, -5


class KernelError(Exception):
    """The kernel refused; `code` is one of the constants above."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _checked(code: int) -> None:
    """Converts the result of a function that may refuse, for ctypes."""
    if code:
        raise KernelError(code)


class Kernel:
    """The functions of the library; they release the GIL while they run."""

    def __init__(self, path: Path = LIBRARY) -> None:
        library = ctypes.CDLL(str(path))
        pointer, size, number, real = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_float
        try:
            interface = library.flambeau_interface()
        except AttributeError as error:
            raise OSError("it is another library") from error
        if interface != _INTERFACE:
            raise OSError(
                f"it has interface {interface}, this version of flambeau needs {_INTERFACE}"
            )

        def function(name: str, *arguments: Any, result: Any = None) -> Any:
            symbol = getattr(library, f"flambeau_{name}")
            symbol.argtypes, symbol.restype = arguments, result
            return symbol

        self._decode = function(
            "decode_region",
            pointer,
            size,
            pointer,
            number,
            number,
            pointer,
            number,
            pointer,
            result=_checked,
        )
        self._resize = function(
            "resize", pointer, pointer, ctypes.c_ssize_t, pointer, number, pointer, result=_checked
        )
        self._floats = function("floats", pointer, size, number, pointer, number, number, pointer)
        self._luma = function("luma", pointer, size, pointer)
        self._blend = function("blend", pointer, size, real, real, pointer)
        self._blend_grey = function("blend_grey", pointer, pointer, size, real, real, pointer)
        self._turn_hue = function("turn_hue", pointer, size, pointer, pointer)
        self._png_rows = function("png_rows", pointer, size, size, number, pointer, result=_checked)
        self._nearest = function(
            "nearest",
            pointer,
            size,
            ctypes.c_ssize_t,
            pointer,
            size,
            pointer,
            size,
            number,
            pointer,
            result=_checked,
        )
        self._keeps = function("keeps", pointer, size, pointer, result=bool)
        self._renumber = function("renumber", pointer, size, pointer, pointer)
        results = [ctypes.POINTER(kind) for kind in (pointer, size)]
        self._segment = function("segment", pointer, size, number, *results, result=_checked)
        self._free = function("free", pointer)
        self._next_marker = function("next_marker", pointer, size, size, result=size)
        self.uses_avx2 = bool(library.flambeau_uses_avx2())

    def next_marker(self, data: bytes, at: int) -> int:
        """Where the next marker of a JPEG begins that is no fill byte and no restart; len(data) for none."""
        found: int = self._next_marker(data, len(data), at)
        return found

    def segment(self, data: bytes, interval_px: int) -> bytes:
        """The result of scan_segments.segment; raises KernelError."""
        result = ctypes.c_void_p()
        size = ctypes.c_size_t()
        self._segment(data, len(data), interval_px, ctypes.byref(result), ctypes.byref(size))
        try:
            return ctypes.string_at(result, size.value)
        finally:
            self._free(result)

    def decode_region(
        self,
        data: bytes,
        box: Box,
        out: Pixels,
        *,
        scale_eighths: int,
        resize: bool = False,
        mirror: bool = False,
        cubic: bool = False,
        scalar: bool = False,
    ) -> None:
        """Fill `out`, (height, width, 1 or 3) and contiguous, with the box; raises KernelError.

        Args:
            data: a JPEG with one sequential scan; with an index of segments only those under the box are
                read, else all from its first to its last row.
            out: of the box's size, or of any with `resize`.
            resize: with antialiasing, as torch.
        """
        height, width, channels = out.shape
        to = (ctypes.c_int * 4)(height, width, mirror, cubic) if resize else None
        corners = (ctypes.c_int * 4)(*box)
        self._decode(data, len(data), corners, scale_eighths, channels, to, scalar, out.ctypes.data)

    def resize(
        self,
        pixels: Pixels,
        out: Pixels,
        *,
        mirror: bool,
        cubic: bool = False,
        like_pillow: bool = False,
        scalar: bool = False,
    ) -> None:
        """Fill `out` with pixels (H, W, 1 or 3) antialiased as by torch; contiguous rows; or KernelError."""
        shape = (ctypes.c_int * 3)(*pixels.shape)
        to = (ctypes.c_int * 5)(*out.shape[:2], mirror, cubic, like_pillow)
        stride = pixels.strides[0]
        self._resize(pixels.ctypes.data, shape, stride, to, scalar, out.ctypes.data)

    def to_floats(
        self,
        pixels: Pixels,
        table: NDArray[np.float32],
        out: NDArray[np.float32],
        *,
        planes: bool,
        stream: bool = False,
    ) -> None:
        """Fill `out` with the value of each level.

        Args:
            pixels: (H, W, C) uint8, contiguous.
            table: (C, 256) float32, contiguous.
            out: float32, contiguous: (C, H, W) with `planes`, else (H, W, C).
            stream: write planes past the caches.
        """
        height, width, channels = pixels.shape
        self._floats(
            pixels.ctypes.data,
            height * width,
            channels,
            table.ctypes.data,
            planes,
            stream,
            out.ctypes.data,
        )

    def luma(self, pixels: Pixels) -> Pixels:
        """(H, W) uint8: 0.2989 red, 0.587 green and 0.114 blue of pixels (H, W, 3), contiguous."""
        out = np.empty(pixels.shape[:2], np.uint8)
        self._luma(pixels.ctypes.data, out.size, out.ctypes.data)
        return out

    def blend(
        self, pixels: Pixels, other: Pixels | np.float32, share: np.float32, rest: np.float32
    ) -> Pixels:
        """`share` times each level and `rest` times the other, clipped and truncated.

        Args:
            pixels: (H, W, C) uint8, contiguous; C is 3 if `other` is an image.
            other: one level, or those of a grey image, (H, W), contiguous.
        """
        out = np.empty_like(pixels)
        if isinstance(other, np.float32):
            self._blend(pixels.ctypes.data, pixels.size, share, other * rest, out.ctypes.data)
        else:
            self._blend_grey(
                pixels.ctypes.data, other.ctypes.data, other.size, share, rest, out.ctypes.data
            )
        return out

    def turn_hue(self, pixels: Pixels, turns: NDArray[np.float32]) -> Pixels:
        """Pixels with another hue, and the same lightness and saturation (HSV).

        Args:
            pixels: (H, W, 3) uint8, contiguous.
            turns: (3,) hues of red, green and blue after the turn, as parts of the circle.
        """
        out = np.empty_like(pixels)
        self._turn_hue(pixels.ctypes.data, pixels.size // 3, turns.ctypes.data, out.ctypes.data)
        return out

    def png_rows(self, rows: bytes, out: Pixels) -> None:
        """Undo the filters of a PNG's rows; raises KernelError.

        Args:
            rows: for each row of `out` a byte, its filter, and width * channels bytes.
        """
        height, width, channels = out.shape
        assert len(rows) >= height * (1 + width * channels)
        self._png_rows(rows, height, width, channels, out.ctypes.data)

    def nearest(
        self,
        mask: Pixels,
        rows: NDArray[np.int32],
        columns: NDArray[np.int32],
        out: Pixels,
        *,
        scalar: bool = False,
    ) -> None:
        """Fill `out` with the pixels of some rows and columns; raises KernelError.

        Args:
            mask: (H, W) uint8; each row must be contiguous.
            rows, columns: contiguous; below H and W, which nothing checks.
            out: (len(rows), len(columns)) uint8, contiguous.
        """
        assert rows.dtype == columns.dtype == np.int32
        assert out.shape == (len(rows), len(columns))
        self._nearest(
            mask.ctypes.data,
            mask.shape[1],
            mask.strides[0],
            rows.ctypes.data,
            len(rows),
            columns.ctypes.data,
            len(columns),
            scalar,
            out.ctypes.data,
        )

    def renumbered(self, mask: Pixels, table: Pixels) -> Pixels:
        """`table[mask]`; the mask itself where that is equal.

        Args:
            mask: of any shape, uint8, contiguous.
            table: (256,) uint8, contiguous.
        """
        if self._keeps(mask.ctypes.data, mask.size, table.ctypes.data):
            return mask
        out = np.empty_like(mask)
        self._renumber(mask.ctypes.data, mask.size, table.ctypes.data, out.ctypes.data)
        return out


@functools.cache
def _load() -> Kernel | str:
    """The kernel, or why there is none."""
    if not LIBRARY.exists():
        return "not built: no C compiler was found when flambeau was installed"
    try:
        return Kernel()
    except OSError as error:
        return f"not used: {LIBRARY} cannot be loaded ({error}); install flambeau again"


def kernel() -> Kernel | None:
    """The kernel, loaded once per process; None if there is none."""
    loaded = _load()
    return loaded if isinstance(loaded, Kernel) else None


def require_kernel(what: str) -> Kernel:
    """The kernel, for something that needs it; `what` begins the message."""
    loaded = kernel()
    if loaded is None:
        raise InputError(
            f"{what} needs flambeau's C kernel, which is {kernel_status()}\n"
            "Install flambeau from a wheel that holds it, or again where there is a C compiler"
        )
    return loaded


def kernel_status() -> str:
    """One line for a person: whether the kernel is used, and if not, why."""
    loaded = _load()
    if isinstance(loaded, str):
        return loaded
    return "built: with AVX2" if loaded.uses_avx2 else "built: without AVX2, which this CPU lacks"
