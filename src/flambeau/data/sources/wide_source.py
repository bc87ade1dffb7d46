"""Images of 16 bits with all of their levels, as floating-point pixels."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.source import (
    PassedMasks,
    PixelKind,
    Source,
    content_sample,
    file_of,
    left_out,
    pixel_kind,
)
from flambeau.data.sources.targets import groups_of, separator_of, task_of
from flambeau.errors import DecodeError
from flambeau.images.decode import Picture

_LOOKED_AT = 64  # images, evenly spaced, of which only headers are read


class WideSource(PassedMasks):
    """The images of a source, all of 16 bits, as float32 levels 0 .. 65535.

    An image of 8 bits among them is a bad image: its levels have another unit.

    Attributes:
        of_8_bits: the same images, which decode to 8 bits.
    """

    pixel_kind: PixelKind = "uint16"

    def __init__(self, source: Source) -> None:
        self.of_8_bits = source
        self.classes: tuple[str, ...] = source.classes
        self.labels: Tensor = source.labels
        self.task = task_of(source)
        self.separator = separator_of(source)

    @property
    def names(self) -> Sequence[str]:
        return self.of_8_bits.names

    @property
    def fingerprint(self) -> str:
        return self.of_8_bits.fingerprint

    @property
    def content_sample(self) -> str:
        return content_sample(self.of_8_bits)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return left_out(self.of_8_bits)

    @property
    def groups(self) -> Sequence[str] | None:
        return groups_of(self.of_8_bits)

    def __len__(self) -> int:
        return len(self.of_8_bits)

    def describe(self, index: int) -> str:
        return self.of_8_bits.describe(index)

    def file_at(self, index: int) -> Path | None:
        return file_of(self.of_8_bits, index)

    def located(self, index: int) -> tuple[Source, int]:
        return self.of_8_bits, index

    def read(self, index: int) -> NDArray[np.float32]:
        return Picture(self.of_8_bits.read(index)).levels()


def is_wide(source: Source) -> bool:
    """Whether all of the images that are looked at have 16 bits."""
    if pixel_kind(source) != "uint8" or not len(source):
        return False
    count = min(len(source), _LOOKED_AT)
    found = False
    for number in range(count):
        try:
            picture = Picture(source.read(number * len(source) // count))
        except (OSError, DecodeError):  # a bad image, which is counted later
            continue
        if not picture.wide:
            return False
        found = True
    return found


def of_kind(source: Source, kind: PixelKind) -> Source:
    """The source with pixels of a kind, if its images can have it: 8-bit or 16-bit ones."""
    if kind == "uint16" and pixel_kind(source) == "uint8":
        return WideSource(source)
    if kind != "uint16" and isinstance(source, WideSource):
        return source.of_8_bits
    return source
