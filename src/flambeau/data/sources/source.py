"""The protocol of a source of labelled images, subsets and concatenations of sources."""

import bisect
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.masks.mask_file import IGNORED, Mask
from flambeau.data.sources.sample_blocks import block_lengths
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import (
    groups_of,
    kind_of_targets,
    renumbered,
    separator_of,
    target_texts,
    task_of,
)
from flambeau.errors import InputError
from flambeau.images.decode import Stored

PixelKind = Literal["uint8", "unit", "float", "uint16"]
"""Decoded pixels: 8 bits; floating-point numbers around 0 .. 1; any floating-point numbers, possibly
normalized; or the levels of 16-bit images as floating-point numbers."""

IN_FILES = ("uint8", "uint16")
"""The kinds of pixels that image files hold."""
_UNIT_KINDS = ("uint8", "unit")


class Source(Protocol):
    """Labelled images by number; can be pickled, and used after a fork and in threads.

    Of several labels per image, or numbers, it has an attribute `task`, and perhaps `separator` (see
    `targets`), and a label is a row.

    Attributes:
        classes: names, in which a label is a position; of other tasks those of labels, or columns of numbers.
        labels: (N,) int64 on the CPU; of other tasks (N, K) float32.
        names: identify an image, even if others are added.
        fingerprint: hexadecimal SHA-256 that identifies the data at little cost, wherever they lie.
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
        """The name of an image in messages: its path, or its file and position there."""

    def read(self, index: int) -> Stored:
        """The image as it is stored; OSError if it cannot be read."""


def pixel_kind(source: Source) -> PixelKind:
    """The kind of a source's pixels; 'uint8' if it does not say."""
    kind: PixelKind = getattr(source, "pixel_kind", "uint8")
    return kind


def stacked_channels(source: Source) -> int | None:
    """How many channels its images have, if they are no color; None for grey and color."""
    channels: int | None = getattr(source, "stacked_channels", None)
    return channels


def content_sample(source: Source) -> str:
    """SHA-256, hexadecimal, of a sample of its files' content; '' if its fingerprint is enough."""
    sample: str = getattr(source, "content_sample", "")
    return sample


def left_out(source: Source) -> tuple[LeftOut, ...]:
    """The files beside its images that it does not read."""
    found: tuple[LeftOut, ...] = getattr(source, "left_out", ())
    return found


def left_out_lines(*sources: Source) -> list[str]:
    """A line on each folder or file of these sources with unread files or columns."""
    # Both parts of a folder of which a share is held out have the same object.
    found = {id(one): one for source in sources for one in left_out(source)}
    seen = set[tuple[str, ...]]()
    lines = list[str]()
    for one in found.values():
        # Of shards with the same columns the first one stands for all.
        lines += (replace(one, columns=()) if one.columns in seen else one).lines
        seen.add(one.columns)
    return lines


def left_out_counts(source: Source) -> dict[str, int]:
    """How many files of a source are left out, by their ending."""
    found = {id(one): one for one in left_out(source)}
    return dict(sum((one.counts for one in found.values()), Counter[str]()))


def left_out_columns(source: Source) -> list[str]:
    """The columns of its tables that a source does not read."""
    return [*dict.fromkeys(name for one in left_out(source) for name in one.columns)]


def file_of(source: Source, index: int) -> Path | None:
    """The file of an image; None if it has no file of its own."""
    file_at: Callable[[int], Path | None] | None = getattr(source, "file_at", None)
    return None if file_at is None else file_at(index)


def mask_of(source: Source, index: int) -> Mask | None:
    """The class of each pixel of an image, (H, W) uint8, 255 for none; None without masks."""
    read: Callable[[int], Mask] | None = getattr(source, "read_mask", None)
    return None if read is None or task_of(source) != "segmentation" else read(index)


def mask_values(source: Source) -> tuple[int, ...]:
    """The number of each class in the masks of a source; empty if it has none."""
    values: tuple[int, ...] = getattr(source, "mask_values", ())
    return values


def mask_problem(source: Source, index: int) -> str | None:
    """What is wrong with an image's mask, if anything."""
    problem_at: Callable[[int], str | None] | None = getattr(source, "mask_problem", None)
    return None if problem_at is None or task_of(source) != "segmentation" else problem_at(index)


def mask_file_of(source: Source, index: int) -> Path | None:
    """The file of an image's mask, if it has one of its own."""
    file_at: Callable[[int], Path | None] | None = getattr(source, "mask_file_at", None)
    return None if file_at is None else file_at(index)


def parts_of(source: Source) -> Sequence[str] | None:
    """What its table says of each image: train, val or test; or None."""
    parts: Sequence[str] | None = getattr(source, "parts", None)
    return parts


def image_blocks(source: Source) -> NDArray[np.int64] | None:
    """The number of images in each run of neighbours that are best read together, in order.

    None if the images are no parts of files. A source of such a file has its images' bytes as `image_sizes`,
    and blocks of its own as `image_blocks`.
    """
    blocks: NDArray[np.int64] | None = getattr(source, "image_blocks", None)
    sizes: NDArray[np.int64] | None = getattr(source, "image_sizes", None)
    if blocks is None and sizes is not None:
        return block_lengths(sizes, np.array([len(sizes)]))
    return blocks


def fetch_ahead(source: Source, indices: NDArray[np.int64]) -> bool:
    """Tell a source which images come next; False if it has enough, or nothing to prepare."""
    method: Callable[[NDArray[np.int64]], bool] | None = getattr(source, "fetch_ahead", None)
    return method is not None and method(indices)


def fetches_ahead(source: Source) -> bool:
    """Whether a source, or a part of it, wants to know which images come next."""
    inner = getattr(source, "made_of", None)
    if inner is not None:
        return any(map(fetches_ahead, inner))
    return hasattr(source, "fetch_ahead")


def has_unit(kind: PixelKind) -> bool:
    """Whether pixels of this kind are in 0 .. 1, or in 8 bits, which stand for that."""
    return kind in _UNIT_KINDS


def same_unit(one: PixelKind, other: PixelKind) -> bool:
    """Whether pixels of two kinds have one range; that of floating-point ones beyond 0 .. 1 is unknown."""
    return one == other or (has_unit(one) and has_unit(other))


def require_unit(source: Source, kind: PixelKind, whose: str) -> None:
    """InputError if the pixels of a source have another range than those of other data."""
    this_kind = pixel_kind(source)
    if not same_unit(this_kind, kind):
        if "uint16" in (this_kind, kind):
            depths = [
                "of 16 bits" if one == "uint16" else "of another kind" for one in (this_kind, kind)
            ]
            raise InputError(
                f"{source.describe(0)}: its pixels are {depths[0]}, and those of {whose} are {depths[1]}\n"
                "Give images of the same depth and unit"
            )
        here, there = "beyond", "within"
        if kind == "float":
            here, there = there, here
        raise InputError(
            f"{source.describe(0)}: pixels {here} 0 .. 1, and those of {whose} are {there} it: "
            "their unit is another one\nReturn both from the same function, with the same transforms"
        )


def names_digest(source: Source) -> str:
    """SHA-256, hexadecimal, of image names and classes, which packing keeps."""
    digest = hashlib.sha256()
    for name, target in zip(source.names, target_texts(source), strict=True):
        digest.update(f"{target}/{name}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


class PassedMasks:
    """What a source of other sources says of masks: the same as these."""

    def located(self, index: int) -> tuple[Source, int]:
        """The source that has an image, and its position there."""
        raise NotImplementedError

    @property
    def mask_values(self) -> tuple[int, ...]:
        return mask_values(self.located(0)[0])

    @property
    def remark(self) -> str:
        return getattr(self.located(0)[0], "remark", "")

    def mask_problem(self, index: int) -> str | None:
        return mask_problem(*self.located(index))

    def mask_file_at(self, index: int) -> Path | None:
        return mask_file_of(*self.located(index))

    def read_mask(self, index: int) -> Mask:
        mask = mask_of(*self.located(index))
        assert mask is not None  # asked for data with masks alone
        return mask


class SubsetSource(PassedMasks):
    """Some images of a source, by indices (M,) int64; with the class numbers of another source, if given.

    `shown`: texts of the targets, which become the classes, where nothing is learned.
    """

    def __init__(
        self,
        source: Source,
        indices: Tensor,
        *,
        classes: tuple[str, ...] | None = None,
        shown: Sequence[str] | None = None,
    ) -> None:
        self._source, self._indices = source, indices
        self._shown = shown
        if shown is not None:
            self.classes = tuple(dict.fromkeys(shown))
            number = {text: label for label, text in enumerate(self.classes)}
            self.labels = torch.tensor([number[text] for text in shown], dtype=torch.int64)
            return
        self.classes = source.classes if classes is None else classes
        self.labels = source.labels[indices]
        if self.classes != source.classes:
            self.labels = renumbered(source, self.labels, self.classes)

    @property
    def made_of(self) -> Sequence[Source]:
        return (self._source,)

    @property
    def indices(self) -> Tensor:
        return self._indices

    @property
    def image_blocks(self) -> NDArray[np.int64] | None:
        blocks = image_blocks(self._source)
        chosen = self._indices.numpy()
        if (
            blocks is None or (np.diff(chosen) < 1).any()
        ):  # not the neighbours that are in the files
            return None
        # What is left of the blocks, so that none is read for two of another division.
        lengths = np.diff(np.searchsorted(chosen, np.cumsum(blocks)), prepend=0)
        return lengths[lengths > 0]

    def fetch_ahead(self, indices: NDArray[np.int64]) -> bool:
        return fetch_ahead(self._source, self._indices.numpy()[indices])

    @property
    def task(self) -> TaskName:
        return task_of(self._source) if self._shown is None else "classification"

    @property
    def separator(self) -> str | None:
        return separator_of(self._source)

    @property
    def groups(self) -> Sequence[str] | None:
        groups = groups_of(self._source)
        return None if groups is None else [groups[index] for index in self._indices.tolist()]

    @property
    def pixel_kind(self) -> PixelKind:
        return pixel_kind(self._source)

    @property
    def stacked_channels(self) -> int | None:
        return stacked_channels(self._source)

    @property
    def content_sample(self) -> str:
        return content_sample(self._source)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return left_out(self._source)

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

    def located(self, index: int) -> tuple[Source, int]:
        return self._source, int(self._indices[index])

    def read_mask(self, index: int) -> Mask:
        mask = super().read_mask(index)
        if self.classes == self._source.classes:
            return mask
        table = np.full(256, IGNORED, np.uint8)
        for at, name in enumerate(self._source.classes):
            if name in self.classes:
                table[at] = self.classes.index(name)
        return table[mask]


def _joined(labels: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other: a view if they lie so in memory, as the labels of an index do."""
    first = labels[0]
    place = first.storage_offset()
    for one in labels:
        same = one.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and one.is_contiguous() and one.storage_offset() == place):
            return torch.cat([*labels])
        place += one.numel()
    shape = (sum(map(len, labels)), *first.shape[1:])
    whole = torch.empty(0, dtype=first.dtype)
    whole.set_(first.untyped_storage(), first.storage_offset(), shape)  # type: ignore[call-overload]
    return whole


class ConcatSource(PassedMasks):
    """Several sources, one after the other.

    Equal classes keep their order; others are merged, in the order of their numbers if all are numbers, else
    of their names.
    """

    def __init__(self, parts: Sequence[Source]) -> None:
        self.task = _same_task(parts)
        self.separator = separator_of(parts[0])
        names = {
            name: None for classes in {part.classes: None for part in parts} for name in classes
        }
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
        self.labels = _joined([part.labels for part in self._parts])
        self._starts = [0, *itertools.accumulate(map(len, parts))]

    @property
    def made_of(self) -> Sequence[Source]:
        return self._parts

    @property
    def image_blocks(self) -> NDArray[np.int64] | None:
        found = [blocks for part in self._parts if (blocks := image_blocks(part)) is not None]
        return np.concatenate(found) if len(found) == len(self._parts) else None

    def fetch_ahead(self, indices: NDArray[np.int64]) -> bool:
        starts = np.array(self._starts)
        parts = np.searchsorted(starts, indices, side="right") - 1
        may_go_on = True
        for part in dict.fromkeys(parts.tolist()):
            local = indices[parts == part] - starts[part]
            may_go_on = fetch_ahead(self._parts[part], local) and may_go_on
        return may_go_on

    @property
    def pixel_kind(self) -> PixelKind:
        """InputError if the parts differ."""
        first, *others = map(pixel_kind, self._parts)
        for part, kind in zip(self._parts[1:], others, strict=True):
            if kind != first:
                raise InputError(
                    f"{part.describe(0)} and {self._parts[0].describe(0)}: one has floating-point pixels, "
                    "or of another range, and the other has not\nGive them to a command of their own"
                )
        return first

    @property
    def stacked_channels(self) -> int | None:
        return stacked_channels(self._parts[0])

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(one for part in self._parts for one in left_out(part))

    @property
    def content_sample(self) -> str:
        return " ".join(filter(None, map(content_sample, self._parts)))

    @property
    def groups(self) -> Sequence[str] | None:
        of_parts = [groups_of(part) for part in self._parts]
        if any(groups is None for groups in of_parts):
            return None
        return [group for groups in of_parts for group in groups or ()]

    @property
    def parts(self) -> Sequence[str] | None:
        of_parts = [parts_of(part) for part in self._parts]
        if any(parts is None for parts in of_parts):
            return None
        return [part for parts in of_parts for part in parts or ()]

    @property
    def names(self) -> Sequence[str]:
        return [f"{k}/{name}" for k, part in enumerate(self._parts) for name in part.names]

    @property
    def fingerprint(self) -> str:
        prints = " ".join(part.fingerprint for part in self._parts)
        return hashlib.sha256(prints.encode()).hexdigest()

    def __len__(self) -> int:
        return self._starts[-1]

    def located(self, index: int) -> tuple[Source, int]:
        part = bisect.bisect_right(self._starts, index) - 1
        return self._parts[part], index - self._starts[part]

    def describe(self, index: int) -> str:
        part, local = self.located(index)
        return part.describe(local)

    def file_at(self, index: int) -> Path | None:
        part, local = self.located(index)
        return file_of(part, local)

    def read(self, index: int) -> Stored:
        part, local = self.located(index)
        return part.read(local)


def _same_task(parts: Sequence[Source]) -> TaskName:
    for part in parts[1:]:
        if task_of(part) != task_of(parts[0]):
            raise InputError(
                f"{part.describe(0)} and {parts[0].describe(0)}: one is for {task_of(part)}, the other for "
                f"{task_of(parts[0])}\nSay which with --task"
            )
    return task_of(parts[0])


HELD_OUT = 0.1
"""The share of each class that is held out of data without a validation part; chosen."""


def hold_out(
    source: Source, *, share: float = HELD_OUT, seed: int = 0, purpose: str = "validate"
) -> tuple[Source, Source]:
    """Split a source into two, class by class, by the hashes of its images' names.

    Images with several labels count by their rarest, those with numbers as one class. Of a class of n images
    round(n * share) are held out, at least one; a single image is kept. The smallest hashes, of seed and
    image name alone, are held out: adding or removing an image moves at most one other of its class. Groups
    are held out as a whole, by the hashes of their names, until they have the share. `purpose` is for a
    message.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share to hold out must be above 0 and below 1, got {share}")

    def hash_of(name: str) -> bytes:
        return hashlib.sha256(f"{seed}\n{name}".encode(errors="surrogateescape")).digest()

    groups = groups_of(source)
    if groups is not None:
        sizes = Counter(groups)
        held_groups = set[str]()
        for one in sorted(sizes, key=hash_of)[:-1]:
            if sum(sizes[name] for name in held_groups) < share * len(source):
                held_groups.add(one)
        if not held_groups:
            raise InputError(
                f"all images are of one group, {groups[0]!r}, so none can be held out to {purpose} on\n"
                f"Name another column as --group, or give a part to {purpose} on"
            )
        held = torch.tensor([name in held_groups for name in groups])
        return SubsetSource(source, (~held).nonzero()[:, 0]), SubsetSource(
            source, held.nonzero()[:, 0]
        )
    hashes = [hash_of(name) for name in source.names]
    members: dict[int, list[int]] = {}
    for index, group in enumerate(kind_of_targets(source).strata(source.labels)):
        members.setdefault(group, []).append(index)
    held = torch.zeros(len(source), dtype=torch.bool)
    for of_class in members.values():
        if len(of_class) > 1:
            count = min(max(1, round(len(of_class) * share)), len(of_class) - 1)
            held[sorted(of_class, key=hashes.__getitem__)[:count]] = True
    if not held.any():
        raise InputError(
            f"no class has two images, so none can be held out to {purpose} on (the first image is "
            f"{source.describe(0)})\nAdd images, or give a folder with train/ and val/"
        )
    return SubsetSource(source, (~held).nonzero()[:, 0]), SubsetSource(source, held.nonzero()[:, 0])
