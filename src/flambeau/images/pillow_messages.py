"""What Pillow and its libtiff print of images that are damaged or large; flambeau names bad images itself.

Source: own, after Python's warnings module and libtiff's TIFFError(3tiff).
"""

import ctypes
import functools
import re
import warnings

from PIL import Image

# In the form of warnings.filters, so that their presence is quickly seen.
# Damaged metadata (EXIF, TIFF tags, MPO index) beside pixels that are fine: the pixels are what counts.
_METADATA = ("ignore", None, UserWarning, re.compile(r"PIL\."), 0)
_LARGE = ("ignore", None, Image.DecompressionBombWarning, None, 0)


def silence_warnings() -> None:
    """Let Pillow pass over damaged metadata, and over images too large for its taste but not for its limit.

    Not `warnings.catch_warnings` around each image: it is not safe in threads, and it makes every other
    warning that Python shows once appear again after each image.
    """
    if _METADATA not in warnings.filters:
        warnings.filterwarnings("ignore", category=UserWarning, module=_METADATA[3].pattern)
    # Behind the filters of a program, which may want an error.
    if _LARGE not in warnings.filters:
        warnings.simplefilter("ignore", Image.DecompressionBombWarning, append=True)


@functools.cache
def silence_libtiff() -> None:
    """Let libtiff keep its errors for itself: it writes several per image to descriptor 2, without a name.

    Pillow raises those that matter, and has silenced libtiff's warnings in the same way. It holds for the
    whole process, as redirecting the descriptor would, but nothing that others write is lost.
    """
    try:  # looked up in Pillow's module and in the libraries that it has loaded
        pillow = ctypes.CDLL(Image.core.__file__)  # type: ignore[attr-defined]
        set_handler = pillow.TIFFSetErrorHandler
    except (OSError, AttributeError):  # a Pillow that is built otherwise: they are printed
        return
    set_handler.argtypes = [ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    set_handler(None)
