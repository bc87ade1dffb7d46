"""What a source of labelled images is, and parts of one."""

import bisect
import hashlib
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from flambeau.errors import InputError
from flambeau.images.decode import Stored

PixelKind = Literal["uint8", "unit", "float"]
"""Of images as they are decoded: of 8 bits; floating-point numbers around 0 .. 1; or any such numbers, maybe
normalized."""


class Source(Protocol):
    """Labelled images by number; can be pickled, and used after a fork and in threads.

    Attributes:
        classes: their names; a label is a position in them.
        labels: (N,) int64 on the CPU.
        names: what identifies an image within the source, even if others are added.
        fingerprint: hexadecimal SHA-256 of what identifies the data at little cost; a moved but unchanged
            source keeps it.
    """

    @property
    def classes(self) -> tuple[str, ...]: ...

    @property
    def labels(self) -> Tensor: ...

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def describe(self, index: int) -> str:
        """What to call an image in a message: its path, or its file and place in it."""

    def read(self, index: int) -> Stored:
        """The image as it is stored; OSError where it cannot be read."""


def pixel_kind(source: Source) -> PixelKind:
    """What the pixels of a source are; 'uint8' where it does not say."""
    kind: PixelKind = getattr(source, "pixel_kind", "uint8")
    return kind


def content_sample(source: Source) -> str:
    """SHA-256, hexadecimal, of a sample of what a source's files hold; '' where its fingerprint is enough."""
    sample: str = getattr(source, "content_sample", "")
    return sample


def file_of(source: Source, index: int) -> Path | None:
    """The file that an image is; None where a source holds its images itself."""
    look: Callable[[int], Path | None] | None = getattr(source, "file_at", None)
    return None if look is None else look(index)


def require_unit(source: Source, kind: PixelKind, whose: str) -> None:
    """InputError where the pixels of a source are not in the unit of others.

    8-bit pixels and floating-point ones of 0 .. 1 have the same; that of any other numbers is not known.

    Args:
        source: that is looked at.
        kind: of the others.
        whose: the others, for the message.
    """
    own = pixel_kind(source)
    if own != kind and "float" in (own, kind):
        here, there = "beyond", "within"
        if kind == "float":
            here, there = there, here
        raise InputError(
            f"{source.describe(0)}: pixels {here} 0 .. 1, and those of {whose} are {there} it: "
            "their unit is another one\nReturn both from the same function, with the same transforms"
        )


class SubsetSource:
    """Some images of a source, in the order given; optionally with the class numbers of another source.

    Args:
        source: what to take them from.
        indices: (M,) int64, positions in it.
        classes: names of which the labels shall be positions; by default the source's own.

    Raises:
        ValueError: an image's class is not among `classes`.
    """

    def __init__(
        self, source: Source, indices: Tensor, *, classes: tuple[str, ...] | None = None
    ) -> None:
        self._source, self._indices = source, indices
        self.classes = source.classes if classes is None else classes
        self.labels = source.labels[indices]
        if self.classes != source.classes:
            number = {name: label for label, name in enumerate(self.classes)}
            renumbered = torch.tensor([number.get(name, -1) for name in source.classes])
            unknown = self.labels[renumbered[self.labels] < 0]
            if len(unknown):
                raise ValueError(f"class {source.classes[int(unknown[0])]!r} is not in classes")
            self.labels = renumbered[self.labels]

    @property
    def pixel_kind(self) -> PixelKind:
        return pixel_kind(self._source)

    @property
    def content_sample(self) -> str:
        return content_sample(self._source)

    @property
    def names(self) -> Sequence[str]:
        names = self._source.names
        return [names[index] for index in self._indices.tolist()]

    @property
    def fingerprint(self) -> str:
        chosen = f"{self._source.fingerprint} {self._indices.tolist()} {self.classes}"
        return hashlib.sha256(chosen.encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def describe(self, index: int) -> str:
        return self._source.describe(int(self._indices[index]))

    def file_at(self, index: int) -> Path | None:
        return file_of(self._source, int(self._indices[index]))

    def read(self, index: int) -> Stored:
        return self._source.read(int(self._indices[index]))


class ConcatSource:
    """Several sources, one after the other.

    Their classes are united: in the order of their numbers where all are numbers, else of their names.

    Args:
        parts: at least one; the first one's classes stay as they are if all have the same.
    """

    def __init__(self, parts: Sequence[Source]) -> None:
        names = {name: None for part in parts for name in part.classes}
        if any(part.classes != parts[0].classes for part in parts):
            by_number = all(name.isdecimal() for name in names)
            names = dict.fromkeys(sorted(names, key=int if by_number else str))
        self.classes = tuple(names)
        self._parts = [
            SubsetSource(part, torch.arange(len(part)), classes=self.classes)
            if part.classes != self.classes
            else part
            for part in parts
        ]
        self.labels = torch.cat([part.labels for part in self._parts])
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    @property
    def pixel_kind(self) -> PixelKind:
        """InputError where the parts differ."""
        first, *others = map(pixel_kind, self._parts)
        for part, kind in zip(self._parts[1:], others, strict=True):
            if kind != first:
                raise InputError(
                    f"{part.describe(0)} and {self._parts[0].describe(0)}: one has floating-point pixels, "
                    "or of another range, and the other has not\nGive them to a command of their own"
                )
        return first

    @property
    def content_sample(self) -> str:
        return " ".join(filter(None, map(content_sample, self._parts)))

    @property
    def names(self) -> Sequence[str]:
        return [f"{k}/{name}" for k, part in enumerate(self._parts) for name in part.names]

    @property
    def fingerprint(self) -> str:
        prints = " ".join(part.fingerprint for part in self._parts)
        return hashlib.sha256(prints.encode()).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def _place(self, index: int) -> tuple[Source, int]:
        part = bisect.bisect_right(self._starts, index) - 1
        return self._parts[part], index - self._starts[part]

    def describe(self, index: int) -> str:
        part, place = self._place(index)
        return part.describe(place)

    def file_at(self, index: int) -> Path | None:
        part, place = self._place(index)
        return file_of(part, place)

    def read(self, index: int) -> Stored:
        part, place = self._place(index)
        return part.read(place)
