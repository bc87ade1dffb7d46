"""The part of a JPEG that is needed, by the C kernel or libjpeg-turbo; what they cannot do is left to Pillow.

JPEG: ITU-T T.81, annex B (markers), A.2.3 (order of the units in a scan). libjpeg-turbo's own
documentation says which sizes and regions it decodes: turbojpeg.h of version 3.

The pixels are those of a full decode, cut out: which library does it changes the speed alone.
What is saved:
- A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size.
- Rows below the part are not decoded: the decoder gets the JPEG with a smaller height in its header, and
  stops there. That needs all components in one sequential scan, which is the usual JPEG.
- What lies above and beside the part is only read, not transformed, by the C kernel (images/native),
  which takes JPEGs of one sequential scan that are not damaged, and by libjpeg-turbo 3
  (tj3SetCroppingRegion). simplejpeg brings libjpeg-turbo along but cannot do that, so without the kernel a
  `libturbojpeg` of the system is used where there is one.
- Of a JPEG whose scan is cut into segments (scan_segments.py) the kernel reads only those under the part.
  To the others it is a JPEG like any other.
"""

import ctypes
import functools
import importlib.metadata
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import simplejpeg

from flambeau.images.jpeg.headers import JpegHeader
from flambeau.images.native import kernel as native
from flambeau.images.pixels import Box, Pixels

# 8 is the full size. Others take longer than that: their transforms are not in SIMD.
SCALES_EIGHTHS = (1, 2, 4, 8)

# Rows below a part that its last row depends on: chroma of half the height is interpolated between rows.
_MARGIN = 2

# Marks a row that no decoder has written; should it be a picture's own last row, Pillow decodes that.
_UNWRITTEN = 0xA5

# The names of the shared library on Linux, macOS (also where Homebrew puts it) and Windows.
_LIBRARIES = (
    "libturbojpeg.so.0",
    "libturbojpeg.dylib",
    "/opt/homebrew/lib/libturbojpeg.dylib",
    "turbojpeg.dll",
)


def scaled(side: int, scale_eighths: int) -> int:
    """Pixels of a side at a scale, as libjpeg rounds them: up.

    Example:
        >>> scaled(13, 8), scaled(13, 4), scaled(13, 1)
        (13, 7, 2)
    """
    return -(-side * scale_eighths // 8)


def decode_region(
    data: bytes, header: JpegHeader, box: Box, *, scale_eighths: int, channels: int
) -> Pixels | None:
    """A part of a JPEG.

    Args:
        data: the whole file.
        header: of `headers.read_header`.
        box: the part, in pixels of the stored image at this scale.
        scale_eighths: one of SCALES_EIGHTHS, 8 for the full size; sides are rounded up.
        channels: 1 for grey (ITU-R 601 luma), 3 for RGB.

    Returns:
        (height, width, channels) uint8, often a view; None where the file may be cut short or is damaged in
        a way that libjpeg-turbo does not pass over: Pillow is the judge of that.

    Example:
        >>> from flambeau.images.jpeg.headers import read_header
        >>> data = simplejpeg.encode_jpeg(np.zeros((30, 50, 3), np.uint8))
        >>> decode_region(data, read_header(data), (2, 1, 7, 9), scale_eighths=4, channels=3).shape
        (7, 9, 3)
    """
    # Entropy-coded data hold no such pair but the end marker; libjpeg-turbo would fill what is missing.
    if data.rfind(b"\xff\xd9", header.scan_at) < 0:
        return None
    top, left, height, width = box
    out = np.empty((height, width, channels), np.uint8)
    if decode_by_kernel(data, header, box, out, scale_eighths=scale_eighths):
        return out
    bottom = (top + height + _MARGIN) * 8 // scale_eighths
    data, rows = _without_rows_below(data, header, bottom)
    library = turbojpeg()
    if library is None:
        pixels = _by_simplejpeg(data, header, rows, scale_eighths, channels)
        first_column = 0
        first_row = 0
    else:
        # The columns at the edges of a region are interpolated without their neighbours.
        unit = header.unit_width * scale_eighths // 8
        first_row = top
        first_column = max(0, left - 1) // unit * unit
        columns = min(left + width + 1, scaled(header.width, scale_eighths)) - first_column
        pixels = library.decode(data, (top, first_column, height, columns), scale_eighths, channels)
    if pixels is None:
        return None
    top, left = top - first_row, left - first_column
    return pixels[top : top + height, left : left + width]


def decode_by_kernel(
    data: bytes,
    header: JpegHeader,
    box: Box,
    out: Pixels,
    *,
    scale_eighths: int,
    resize: bool = False,
    mirror: bool = False,
    cubic: bool = False,
) -> bool:
    """A part of a JPEG by the C kernel, with the arguments of its `decode_region`.

    Returns:
        False where there is no kernel, or none that is faster, or the file is not one for it: progressive, or
        damaged in the slightest; libjpeg-turbo is the judge of that.
    """
    kernel = native.kernel()
    if kernel is None or not (kernel.uses_avx2 or header.segmented):
        return False  # libjpeg-turbo has SIMD of every kind
    if not header.sequential or data.rfind(b"\xff\xd9", header.scan_at) < 0:
        return False
    try:
        kernel.decode_region(
            data, box, out, scale_eighths=scale_eighths, resize=resize, mirror=mirror, cubic=cubic
        )
    except native.KernelError:
        return False
    return True


def _without_rows_below(data: bytes, header: JpegHeader, bottom: int) -> tuple[bytes, int]:
    """The file with a height of at least `bottom` rows, and that height; the pixels themselves stay."""
    rows = -(-bottom // header.unit_height) * header.unit_height
    if not header.sequential or rows >= header.height:
        return data, header.height
    at = header.height_at
    return b"".join((data[:at], rows.to_bytes(2, "big"), data[at + 2 :])), rows


def _by_simplejpeg(
    data: bytes, header: JpegHeader, rows: int, scale_eighths: int, channels: int
) -> Pixels | None:
    out = _unwritten(scaled(rows, scale_eighths), scaled(header.width, scale_eighths), channels)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            "RGB" if channels == 3 else "GRAY",
            min_height=out.shape[0],
            min_width=out.shape[1],
            min_factor=8 // scale_eighths,
            buffer=out,
            strict=False,  # as Pillow: what libjpeg-turbo warns of is passed over
        )
    except (ValueError, MemoryError):
        return None
    return out if pixels.shape == out.shape and _is_written(out) else None


def _unwritten(height: int, width: int, channels: int) -> Pixels:
    out = np.empty((height, width, channels), np.uint8)
    out[-1] = _UNWRITTEN
    return out


def _is_written(out: Pixels) -> bool:
    """False where the decoder gave up: after a warning libjpeg-turbo reports an error as a warning, too."""
    return bool((out[-1] != _UNWRITTEN).any())


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("x", "y", "w", "h")]


class _Factor(ctypes.Structure):
    _fields_ = [("num", ctypes.c_int), ("denom", ctypes.c_int)]


class TurboJpeg:
    """libjpeg-turbo 3, which decodes a region; safe in threads.

    Args:
        name: of the shared library.

    Raises:
        OSError: no such library.
        AttributeError: an older one.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        library = ctypes.CDLL(name)  # it holds no lock of Python while it decodes
        handle, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        for function, result, arguments in (
            ("tj3Init", handle, [number]),
            ("tj3Destroy", None, [handle]),
            ("tj3DecompressHeader", number, [handle, ctypes.c_char_p, size]),
            ("tj3SetScalingFactor", number, [handle, _Factor]),
            ("tj3SetCroppingRegion", number, [handle, _Region]),
            ("tj3GetErrorCode", number, [handle]),
            ("tj3Decompress8", number, [handle, ctypes.c_char_p, size, handle, number, number]),
        ):
            getattr(library, function).restype = result
            getattr(library, function).argtypes = arguments
        self._library = library
        self._of_thread = threading.local()  # a handle serves one thread at a time

    def decode(self, data: bytes, box: Box, scale_eighths: int, channels: int) -> Pixels | None:
        """The box of a JPEG; None where it is damaged, or the library cannot decode the box."""
        if not hasattr(self._of_thread, "handle"):
            self._of_thread.handle = _Handle(self._library)
        handle = self._of_thread.handle.pointer
        library = self._library
        top, left, height, width = box
        pixels = _unwritten(height, width, channels)
        rgb, grey = 0, 6  # TJPF_RGB and TJPF_GRAY of turbojpeg.h
        steps: tuple[Callable[[], int], ...] = (
            lambda: library.tj3DecompressHeader(handle, data, len(data)),
            lambda: library.tj3SetScalingFactor(handle, _Factor(1, 8 // scale_eighths)),
            lambda: library.tj3SetCroppingRegion(handle, _Region(left, top, width, height)),
            lambda: library.tj3Decompress8(
                handle, data, len(data), pixels.ctypes.data, 0, rgb if channels == 3 else grey
            ),
        )
        # As Pillow: what libjpeg-turbo warns of is passed over; 1 is TJERR_FATAL.
        failed = any(step() and library.tj3GetErrorCode(handle) == 1 for step in steps)
        if failed or not _is_written(pixels):
            # After a damaged header 3.1.3 refuses good files too, so the next one gets a new decoder.
            del self._of_thread.handle
            return None
        return pixels


class _Handle:
    """A decoder of the library, given back with the thread that it belongs to."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._destroy: Any = library.tj3Destroy
        self.pointer = library.tj3Init(1)  # TJINIT_DECOMPRESS
        if not self.pointer:
            raise MemoryError("libjpeg-turbo has no memory for a decoder")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._destroy(self.pointer)


@functools.cache
def turbojpeg() -> TurboJpeg | None:
    """libjpeg-turbo 3 of the system, looked for once; None where there is none or an older one."""
    for name in _LIBRARIES:
        try:
            return TurboJpeg(name)
        except (OSError, AttributeError):
            continue
    return None


def jpeg_decoder() -> str:
    """Which library decodes the JPEGs that the C kernel does not, for a report.

    Example:
        >>> jpeg_decoder().startswith(("simplejpeg 1.", "libturbojpeg 3"))
        True
    """
    library = turbojpeg()
    if library is not None:
        return f"libturbojpeg 3, only the part needed ({library.name})"
    return f"simplejpeg {importlib.metadata.version('simplejpeg')}"
