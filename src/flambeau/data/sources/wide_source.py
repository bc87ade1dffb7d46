"""Images with all of the levels and channels that they are stored with, beyond 8 bits and color."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.source import (
    PassedMasks,
    PixelKind,
    Source,
    content_sample,
    fetch_ahead,
    file_of,
    image_blocks,
    left_out,
    pixel_kind,
    stacked_channels,
)
from flambeau.data.sources.targets import groups_of, separator_of, task_of
from flambeau.errors import DecodeError, InputError
from flambeau.images.all_channels import StoredChannels, all_channels, stored_channels
from flambeau.images.decode import Picture

LOOKED_AT = 64
"""Images, evenly spaced, of which the headers are read."""
_FEW = 8  # of which they are read first, as most sets are color of 8 bits; chosen

COLORS = (1, 3)
"""Numbers of channels of grey and color, to which images of any kind are converted."""


class WideSource(PassedMasks):
    """Images as float32 levels 0 .. 65535 of 16 bits, with all of their channels, or both.

    With 16 bits an image of 8 is a bad one: its levels have another unit. With all channels one of another
    number is.
    """

    def __init__(
        self, source: Source, pixel_kind: PixelKind, *, stacked_channels: int | None = None
    ) -> None:
        self.plain = source
        self.pixel_kind: PixelKind = pixel_kind
        self.stacked_channels = stacked_channels
        self.classes: tuple[str, ...] = source.classes
        self.labels: Tensor = source.labels
        self.task = task_of(source)
        self.separator = separator_of(source)

    @property
    def made_of(self) -> Sequence[Source]:
        return (self.plain,)

    @property
    def image_blocks(self) -> NDArray[np.int64] | None:
        return image_blocks(self.plain)

    def fetch_ahead(self, indices: NDArray[Any]) -> bool:
        return fetch_ahead(self.plain, indices)

    @property
    def names(self) -> Sequence[str]:
        return self.plain.names

    @property
    def fingerprint(self) -> str:
        return self.plain.fingerprint

    @property
    def content_sample(self) -> str:
        return content_sample(self.plain)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return left_out(self.plain)

    @property
    def groups(self) -> Sequence[str] | None:
        return groups_of(self.plain)

    def __len__(self) -> int:
        return len(self.plain)

    def describe(self, index: int) -> str:
        return self.plain.describe(index)

    def file_at(self, index: int) -> Path | None:
        return file_of(self.plain, index)

    def located(self, index: int) -> tuple[Source, int]:
        return self.plain, index

    def read(self, index: int) -> NDArray[Any]:
        data = self.plain.read(index)
        if self.stacked_channels is None:
            return Picture(data).levels()
        return in_kind(all_channels(data, self.stacked_channels), self.pixel_kind)


def in_kind(x_HWC: NDArray[Any], kind: PixelKind) -> NDArray[Any]:
    """Samples in this kind; DecodeError if they have too few bits."""
    if kind == "uint16":
        if x_HWC.dtype == np.uint8:
            raise DecodeError("8 bits per level, and the training images have 16")
        return x_HWC.astype(np.float32)
    if x_HWC.dtype == np.uint16:
        return ((x_HWC.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    return x_HWC


class PixelFormat(NamedTuple):
    """What is read of pixels; `stacked_channels`: how many, if no color; None: grey or color."""

    kind: PixelKind
    stacked_channels: int | None


def found_format(
    source: Source, *, channels: int | None = None, bits: int | None = None
) -> PixelFormat:
    """The format of some images: 16 bits if all have them, all channels if they are no color; else what is
    asked for.

    InputError: an image without what is asked for, or with other channels than another one.
    """
    is_asked = channels is not None or bits is not None
    looked = headers(source, is_asked=is_asked)
    stacked = _stacked(source, looked, channels)
    kind = pixel_kind(source)
    if kind != "uint8":
        if bits is not None:
            raise InputError(
                f"bits = {bits} has no place with the floating-point pixels of {source.describe(0)}: "
                "leave it out"
            )
        return PixelFormat(kind, stacked)
    narrow = next(
        (
            index
            for index, found in looked.items()
            if not (found.is_wide if stacked is None else found.has_wide_samples)
        ),
        None,
    )
    if bits == 16 and narrow is not None:
        raise InputError(
            f"{source.describe(narrow)} is read with 8 bits per level, and bits = 16\n"
            "Which of 16 bits its levels stand for is unknown: give images of 16 bits, or leave --bits out"
        )
    is_wide = bool(looked) and narrow is None and bits != 8
    return PixelFormat("uint16" if is_wide else "uint8", stacked)


def require_channels(source: Source, stacked: int | None, whose: str) -> None:
    """InputError if one of some images has other channels than `stacked`; color is not checked."""
    if stacked is None:
        return
    for index, found in headers(source).items():
        if not found.can_give(stacked):
            raise InputError(
                f"{source.describe(index)} has {_counted(found)}, and {whose} {stacked}\n"
                "Give images of the same number of channels"
            )


def headers(source: Source, *, is_asked: bool = True) -> dict[int, StoredChannels]:
    """What some images' headers say, by position, without bad ones.

    Unless it `is_asked`, few are read if these are all grey or color of 8 bits.
    """
    found: dict[int, StoredChannels] = {}
    for most in (_FEW, LOOKED_AT)[is_asked:]:
        count = min(len(source), most)
        for number in range(count):
            index = number * len(source) // count
            if index not in found:
                with contextlib.suppress(OSError, DecodeError):
                    found[index] = stored_channels(source.read(index))
        if found and not any(_is_unusual(one) for one in found.values()):
            break
    return dict(sorted(found.items()))


def _is_unusual(found: StoredChannels) -> bool:
    return found.are_no_color or found.may_be_alpha or found.is_wide


def _stacked(source: Source, looked: dict[int, StoredChannels], channels: int | None) -> int | None:
    """How many channels all images have, if those are no color or so many are asked for."""
    no_color = next((index for index, found in looked.items() if found.are_no_color), None)
    wanted = channels
    if no_color is not None:
        count = looked[no_color].channels
        if channels in COLORS:
            raise InputError(
                f"{source.describe(no_color)} has {count} channels that are no color, and channels = "
                f"{channels}\nLeave --channels out, which keeps all of them"
            )
        wanted = channels or count
    if wanted in COLORS or wanted is None:
        return None
    for index, found in looked.items():
        if not found.can_give(wanted):
            of_other = (
                f"channels = {channels}"
                if no_color is None or channels
                else f"{source.describe(no_color)} has {wanted}"
            )
            raise InputError(
                f"{source.describe(index)} has {_counted(found)}, and {of_other}\n"
                "Give images of the same number of channels"
            )
    return wanted


def _counted(found: StoredChannels) -> str:
    channels = f"{found.channels} channel{'s' if found.channels != 1 else ''}"
    return channels if found.pages == 1 else f"{channels} in each of {found.pages} pages"


def of_kind(source: Source, kind: PixelKind, stacked: int | None = None) -> Source:
    """The source with pixels of 8 or 16 bits, if its images can have them.

    `stacked`: their channels, if no color; 1 and 3 count as color.
    """
    plain = source.plain if isinstance(source, WideSource) else source
    known = pixel_kind(plain)
    needs_levels = kind == "uint16" and known == "uint8"
    needs_channels = stacked not in (None, *COLORS, stacked_channels(plain))
    if not needs_levels and not needs_channels:  # a part of a WideSource has both
        return plain
    return WideSource(
        plain,
        "uint16" if needs_levels else known,
        stacked_channels=None if stacked in COLORS else stacked,
    )
