"""Silences Pillow and its libtiff about damaged or large images; flambeau names bad images itself.

After Python's warnings module and libtiff's TIFFError(3tiff).
"""

import ctypes
import functools
import re
import warnings

from PIL import Image

# In the form of warnings.filters, so that their presence is quickly checked.
# Damaged metadata (EXIF, TIFF tags, MPO index) beside good pixels does not matter.
_METADATA = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)
_LARGE = ("ignore", None, Image.DecompressionBombWarning, None, 0)


def silence_warnings() -> None:
    """Ignore Pillow's warnings about damaged metadata, and about images that are large but allowed.

    `warnings.catch_warnings` around each image is not thread-safe, and would repeat every other warning.
    """
    if _METADATA not in warnings.filters:
        warnings.filterwarnings("ignore", category=UserWarning, module=_METADATA[3].pattern)
    # After the filters of a program, which may want an error.
    if _LARGE not in warnings.filters:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning, append=True)


@functools.cache
def silence_libtiff() -> None:
    """Keep libtiff from printing errors: it writes several per image to descriptor 2, without a name.

    Pillow raises those that matter. It applies to the whole process; nothing that others write is lost.
    """
    try:  # searched in Pillow's module and in the libraries that it has loaded
        pillow = ctypes.CDLL(Image.core.__file__)  # type: ignore[attr-defined]
        set_handler = pillow.TIFFSetErrorHandler
    except (OSError, AttributeError):  # another build of Pillow: they are printed
        return
    set_handler.argtypes = [ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    set_handler(None)
