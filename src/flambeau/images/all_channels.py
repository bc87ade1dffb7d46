"""All channels of an image as they are stored, where they are no color, or an alpha is data of its own.

Not for pictures: `decode.Picture` gives these as grey or RGB, with transparent parts over white.
"""

import contextlib
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from flambeau.errors import DecodeError, UnsupportedImage
from flambeau.images import stacked_tiff, tiff
from flambeau.images.channels import num_shown
from flambeau.images.decode import Picture, Stored, decode_errors, native_header, open_file
from flambeau.images.exif_orientation import info_orientation, turn_upright
from flambeau.images.pixels import MAX_CHANNELS, MAX_PIXELS
from flambeau.images.wide_levels import is_wide, wide_levels

_MODES = {"L": "L", "1": "L", "LA": "LA", "La": "LA", "RGBA": "RGBA", "RGBa": "RGBA", "PA": "RGBA"}
_COUNTS = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


class StoredChannels(NamedTuple):
    """What the header of an image says of its channels.

    Attributes:
        are_no_color: more than grey or color and an alpha.
        may_be_alpha: nothing says whether the last of four channels is an alpha.
        is_wide: 16 bits per level of grey or color.
        has_wide_samples: 16 bits per sample, where all channels are read.
    """

    channels: int
    are_no_color: bool
    may_be_alpha: bool
    is_wide: bool
    has_wide_samples: bool
    pages: int = 1

    def can_give(self, count: int) -> bool:
        """Whether `all_channels` finds so many."""
        return count in (self.channels, self.pages * self.channels)


def stored_channels(data: Stored) -> StoredChannels:
    """Read an image's header; DecodeError if damaged or of an unknown kind."""
    if isinstance(data, np.ndarray):
        wide = Picture(data).wide
        count = data.shape[2] if data.ndim == 3 else 1
        may_be_alpha = count == 4 and data.dtype != np.float32
        are_no_color = count not in (1, 3) and not may_be_alpha
        return StoredChannels(count, are_no_color, may_be_alpha, wide, wide)
    header = native_header(data)
    if header is not None:
        return StoredChannels(header.channels, False, False, False, False)
    with decode_errors():
        stack = stacked_tiff.read_header(data)
        if stack is not None:
            are_no_color = stack.has_more_channels
            wide = stack.bits == 16
            if wide and not are_no_color:  # of planes Pillow gives 8 bits alone, or nothing
                with contextlib.suppress(UnsupportedImage):
                    wide = is_wide(open_file(data))
            return StoredChannels(stack.channels, are_no_color, False, wide, stack.bits == 16)
        image = open_file(data)
        wide = is_wide(image)
        count = 1 if image.mode.startswith("I") else _COUNTS[_mode(image)]
        return StoredChannels(count, False, False, wide, wide, _num_pages(image))


def all_channels(data: Stored, count: int) -> NDArray[Any]:
    """The samples (H, W, count) of an image of so many channels or pages, upright; an alpha is a channel.

    uint8, uint16, or float32 as given; perhaps a view. DecodeError: damaged, or of other channels.
    """
    if isinstance(data, np.ndarray):
        Picture(data)  # refuses other shapes and types
        x_HWC = data if data.ndim == 3 else data[:, :, None]
    else:
        with decode_errors():
            x_HWC = _of_file(data, count)
    if x_HWC.shape[2] != count:
        raise DecodeError(f"an image of {_counted(x_HWC.shape[2])}, where {count} are wanted")
    return x_HWC


def shown_pixels(data: Stored) -> NDArray[Any]:
    """A picture of any channels: (H, W, 3), or (H, W, 1) of two that are no color."""
    found = stored_channels(data)
    if not found.are_no_color:
        return Picture(data).pixels(channels=3)
    return all_channels(data, found.channels)[:, :, : num_shown(found.channels)]


def _of_file(data: bytes, count: int) -> NDArray[Any]:
    stack = stacked_tiff.read_header(data)
    if stack is not None:
        return stacked_tiff.samples(data, stack)
    image = open_file(data)
    if count > 1 and _num_pages(image) == count:
        return _channels_of_pages(image, count)
    orientation = info_orientation(image.info) if image.format != "TIFF" else 1
    if is_wide(image):
        levels: NDArray[Any] = wide_levels(lambda: open_file(data), keep_alpha=True)
    else:
        levels = np.asarray(image.convert(_mode(image)))
    levels = levels if levels.ndim == 3 else levels[:, :, None]
    return np.ascontiguousarray(turn_upright(levels, orientation))


def _mode(image: Image.Image) -> str:
    """The mode of Pillow with all of its channels."""
    if image.mode == "P" and image.has_transparency_data:
        return "RGBA"
    return _MODES.get(image.mode, "RGB")


def _counted(count: int) -> str:
    return f"{count} channel{'s' if count > 1 else ''}"


_GREY = ("1", "L", "I", "I;16", "I;16B", "I;16L", "I;16N")


def _num_pages(image: Image.Image) -> int:
    """The pages of an opened image, up to one more than there can be channels; 1 if the first is not grey."""
    if not isinstance(image, TiffImageFile) or image.mode not in _GREY:
        return 1
    try:
        for page in range(1, MAX_CHANNELS + 1):
            image.seek(page)
    except EOFError:
        return page
    finally:
        image.seek(0)
    return MAX_CHANNELS + 1


def _channels_of_pages(image: Image.Image, count: int) -> NDArray[Any]:
    """The pages of a TIFF that was just opened side by side, upright, (H, W, count); as microscopes and
    ImageJ write them.

    Nothing in a file says whether its pages are channels or images of their own, so they are read as channels
    only where so many are wanted. Pages must be grey, and all of one size and depth.
    """
    assert isinstance(image, TiffImageFile)
    if image.width * image.height * count > MAX_PIXELS:
        raise DecodeError(
            f"{count} pages of {image.width} x {image.height} pixels are more than {MAX_PIXELS}, the most "
            "allowed"
        )
    planes: list[NDArray[Any]] = []
    begin = 0  # of the tags of a page
    for page in range(count):
        image.seek(page)
        if (
            page and image.tag_v2.next == begin
        ):  # of tags that are cut off Pillow keeps those of the page before
            raise DecodeError(f"the tags of its page {page + 1} are cut off")
        begin = image.tag_v2.next
        tiff.require_readable(image.tag_v2)
        if image.mode not in _GREY:
            raise UnsupportedImage(
                f"its page {page + 1} is not grey: {tiff.Kind(image.tag_v2).name}"
            )
        plane = _plane(image)
        if planes and (plane.shape, plane.dtype) != (planes[0].shape, planes[0].dtype):
            raise DecodeError(
                f"its page {page + 1} has {_words(plane)}, and the first one {_words(planes[0])}"
            )
        planes.append(plane)
    return np.stack(planes, axis=2)


def _plane(image: TiffImageFile) -> NDArray[Any]:
    if is_wide(image):
        return wide_levels(lambda: image)[:, :, 0]
    return np.asarray(image.convert("L"))


def _words(plane: NDArray[Any]) -> str:
    return f"{plane.shape[1]} x {plane.shape[0]} pixels of {8 * plane.itemsize} bits"
