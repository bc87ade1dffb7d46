"""The part of a JPEG that is needed, by the C kernel or libjpeg-turbo; what they cannot do is left to Pillow.

JPEG: ITU-T T.81, annex B (markers), A.2.3 (order of the units in a scan). libjpeg-turbo's own
documentation says which sizes and regions it decodes: turbojpeg.h of version 3.

The pixels are those of a full decode, cut out: which library does it changes the speed alone.
Three things are saved.
- A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size.
- Rows below the part are not decoded: the decoder gets the JPEG with a smaller height in its header, and
  stops there. That needs all components in one sequential scan, which is the usual JPEG.
- What lies above and beside the part is only read, not transformed, by the C kernel (data/images/native),
  which takes JPEGs of one sequential scan that are not damaged, and by libjpeg-turbo 3
  (tj3SetCroppingRegion). simplejpeg brings libjpeg-turbo along but cannot do that, so without the kernel a
  `libturbojpeg` of the system is used where there is one.
"""

import ctypes
import functools
import importlib.metadata
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from flambeau.data.images.exif_orientation import UPRIGHT, Box, exif_orientation
from flambeau.data.images.jpeg.headers import INDEX_MARKER, INDEX_NAME, JpegError, Spans, walk
from flambeau.data.images.native import kernel as native

Pixels = NDArray[np.uint8]

SCALES = (
    8,
    4,
    2,
    1,
)  # other eighths take longer than the full size: their transforms are not in SIMD

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


class JpegHeader(NamedTuple):
    """What the segments before the pixels say.

    Attributes:
        height, width: as stored, not turned; at least 1.
        channels: 1 for grey, 3 for colour.
        orientation: of EXIF, 1 to 8.
        unit_height, unit_width: pixels of the blocks that are coded together, 8 to 32.
        height_at: where in the file the height is, two bytes.
        scan_at: where in the file the pixels begin.
        sequential: all components are in one scan from top to bottom.
        segmented: it carries an index of its segments, for data/images/jpeg/scan_segments.py.
        spans: marker, begin and end of the body of each segment before the pixels.
    """

    height: int
    width: int
    channels: int
    orientation: int
    unit_height: int
    unit_width: int
    height_at: int
    scan_at: int
    sequential: bool
    segmented: bool
    spans: Spans


def read_header(data: bytes) -> JpegHeader | None:
    """The header of a JPEG of 8 bits, grey or in three colours, Huffman-coded.

    Args:
        data: any bytes.

    Returns:
        None for everything else: no JPEG, a damaged header, CMYK, 12 bits, lossless, arithmetic coding.

    Example:
        >>> import numpy as np, simplejpeg
        >>> data = simplejpeg.encode_jpeg(np.zeros((30, 50, 3), np.uint8), colorsubsampling="420")
        >>> header = read_header(data)
        >>> header.height, header.width, header.unit_height, header.sequential
        (30, 50, 16, True)
    """
    try:
        spans = walk(data)
    except JpegError:
        return None
    frame, exif, segmented = 0, b"", False
    for marker, begin, end in spans:
        if marker in (0xC0, 0xC1, 0xC2) and not frame:
            frame = begin
        elif marker == 0xE1 and data.startswith(b"Exif\0\0", begin):
            if exif:
                return None  # in several parts: Pillow knows how to join them
            exif = data[begin:end]
        elif marker == INDEX_MARKER:
            segmented = segmented or data.startswith(INDEX_NAME, begin)
        elif 0xC0 <= marker <= 0xCF and marker != 0xC4:
            return None
    return _header(data, frame, spans, exif, segmented) if frame else None


def _header(
    data: bytes, frame: int, spans: Spans, exif: bytes, segmented: bool
) -> JpegHeader | None:
    scan = spans[-1][1]
    precision, channels = data[frame], data[frame + 5]
    height = data[frame + 1] << 8 | data[frame + 2]
    width = data[frame + 3] << 8 | data[frame + 4]
    factors = data[frame + 7 : frame + 7 + 3 * channels : 3]
    if precision != 8 or channels not in (1, 3) or not height or not width or scan >= len(data):
        return None
    across, down = [factor >> 4 for factor in factors], [factor & 15 for factor in factors]
    if min(across + down) < 1 or max(across + down) > 4:
        return None
    return JpegHeader(
        height,
        width,
        channels,
        exif_orientation(exif) if exif else UPRIGHT,
        8 * max(down),
        8 * max(across),
        frame + 1,
        scan - 4,
        data[frame - 3] != 0xC2 and data[scan] == channels,
        segmented,
        spans,
    )


def decode_region(
    data: bytes, header: JpegHeader, box: Box, *, scale: int, channels: int
) -> Pixels | None:
    """A part of a JPEG.

    Args:
        data: the whole file.
        header: of `read_header`.
        box: the part, in pixels of the stored image at this scale.
        scale: one of SCALES: the sides are divided by it, and rounded up.
        channels: 1 for grey (ITU-R 601 luma), 3 for RGB.

    Returns:
        (height, width, channels) uint8, often a view; None where the file may be cut short or is damaged in
        a way that libjpeg-turbo does not pass over: Pillow is the judge of that.

    Example:
        >>> import numpy as np, simplejpeg
        >>> data = simplejpeg.encode_jpeg(np.zeros((30, 50, 3), np.uint8))
        >>> decode_region(data, read_header(data), (2, 1, 7, 9), scale=2, channels=3).shape
        (7, 9, 3)
    """
    # Entropy-coded data hold no such pair but the end marker; libjpeg-turbo would fill what is missing.
    if data.rfind(b"\xff\xd9", header.scan_at) < 0:
        return None
    top, left, height, width = box
    out = np.empty((height, width, channels), np.uint8)
    if decode_by_kernel(data, header, box, out, scale=scale):
        return out
    data, rows = _without_rows_below(data, header, (top + height + _MARGIN) * scale)
    library = turbojpeg()
    if library is None:
        pixels, first_column = _by_simplejpeg(data, header, rows, scale, channels), 0
        first_row = 0
    else:
        # The columns at the edges of a region are interpolated without their neighbours.
        unit = header.unit_width // scale
        first_row, first_column = top, max(0, left - 1) // unit * unit
        columns = min(left + width + 1, -(-header.width // scale)) - first_column
        pixels = library.decode(data, (top, first_column, height, columns), scale, channels)
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
    scale: int,
    resize: bool = False,
    mirror: bool = False,
) -> bool:
    """A part of a JPEG by the C kernel, with the arguments of its `decode_region`; scale as here.

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
        kernel.decode_region(data, box, out, scale=8 // scale, resize=resize, mirror=mirror)
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
    data: bytes, header: JpegHeader, rows: int, scale: int, channels: int
) -> Pixels | None:
    out = _unwritten(-(-rows // scale), -(-header.width // scale), channels)
    try:
        pixels: Pixels = simplejpeg.decode_jpeg(
            data,
            "RGB" if channels == 3 else "GRAY",
            min_height=out.shape[0],
            min_width=out.shape[1],
            min_factor=scale,
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

    def decode(self, data: bytes, box: Box, scale: int, channels: int) -> Pixels | None:
        """The box of a JPEG; None where it is damaged, or the box is not to be had."""
        if not hasattr(self._of_thread, "handle"):
            self._of_thread.handle = _Handle(self._library)
        handle, library = self._of_thread.handle.pointer, self._library
        top, left, height, width = box
        pixels = _unwritten(height, width, channels)
        rgb, grey = 0, 6  # TJPF_RGB and TJPF_GRAY of turbojpeg.h
        steps: tuple[Callable[[], int], ...] = (
            lambda: library.tj3DecompressHeader(handle, data, len(data)),
            lambda: library.tj3SetScalingFactor(handle, _Factor(1, scale)),
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
