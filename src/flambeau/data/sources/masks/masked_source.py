"""Images with a mask each: the number of a class for every pixel.

N: images, K: classes, H: height, W: width.
"""

import bisect
import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.fingerprint import sampled_content
from flambeau.data.sources.fingerprint import size_of as size_of_file
from flambeau.data.sources.index_cache import stored_index
from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.masks.mask_classes import MaskClasses, NamedValues, found_classes
from flambeau.data.sources.masks.mask_file import Mask, decoded_mask, require_same_size
from flambeau.data.sources.source import (
    PixelKind,
    Source,
    content_sample,
    fetch_ahead,
    file_of,
    image_blocks,
    left_out,
    parts_of,
    pixel_kind,
)
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import TargetChoice, groups_of
from flambeau.errors import DecodeError, InputError
from flambeau.images.decode import Stored, size_of
from flambeau.images.stand_ins import why_unreadable
from flambeau.images.thread_pool import DecodePool
from flambeau.regular_file import read_file
from flambeau.terminal import CountBar

_KIND = "masks 1"
_MANY = 2000  # masks from which on reading them all shows a bar; chosen


@dataclass(frozen=True)
class Masks:
    """The masks of N images, as they are stored; the functions can be pickled.

    Attributes:
        read: a whole file, or an array, by position; OSError if it cannot be read.
        fingerprint: SHA-256, hexadecimal, of names and sizes.
        stamp: changes if one is written again.
        file_at: the file of a mask; None if they have none of their own.
        known: the counts of their numbers, and the masks with a problem, if known already.
    """

    read: Callable[[int], Any]
    describe: Callable[[int], str]
    fingerprint: str
    stamp: str = ""
    file_at: Callable[[int], Path] | None = None
    index: Path | None = None
    named: NamedValues | None = None
    column: str = ""
    known: tuple[NDArray[np.uint32], Mapping[int, str]] | None = None


@dataclass(frozen=True)
class _Files:
    paths: tuple[Path, ...]

    def read(self, index: int) -> bytes:
        return read_file(self.paths[index])

    def describe(self, index: int) -> str:
        return str(self.paths[index])

    def file_at(self, index: int) -> Path:
        return self.paths[index]


def masks_in_files(
    paths: Sequence[Path], names: Sequence[str], *, index: Path, named: NamedValues | None
) -> Masks:
    """The masks in files; by their `names` they are known, wherever the data lie."""
    digest, times = hashlib.sha256(), hashlib.sha256()
    for path, name in zip(paths, names, strict=True):
        digest.update(os.fsencode(f"{name}\0{size_of_file(path)}\n"))
        times.update(f"{_time_of(path)}\n".encode())
    files = _Files(tuple(paths))
    digest.update(sampled_content(len(paths), files.file_at).encode())
    return Masks(
        read=files.read,
        describe=files.describe,
        fingerprint=digest.hexdigest(),
        stamp=times.hexdigest(),
        file_at=files.file_at,
        index=index,
        named=named,
    )


def _time_of(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return -1


class MaskedSource:
    """A source of images, and the mask of each.

    All masks are read once when it is opened, for their classes; the result is kept beside them.

    Attributes:
        labels: (N, K) float32, each class's share of an image's pixels; the rest is ignored.
        are_named: the class names do not depend on the numbers that occur.
        mask_values: each class's number in the masks.
        counts: (N, 256) uint32, pixels of each number.
    """

    task: TaskName = "segmentation"

    def __init__(self, images: Source, masks: Masks, choice: TargetChoice) -> None:
        self.images, self.masks = images, masks
        self.counts: NDArray[np.uint32]
        self.problems: Mapping[int, str]
        if masks.known is None:
            found = _counted(images, masks)
            self.counts = found["counts"]
            self.problems = {
                int(at): text for at, text in zip(found["bad"], _texts(found["why"]), strict=True)
            }
        else:
            self.counts, self.problems = masks.known
        if len(self.problems) == len(images):
            raise InputError(f"{masks.describe(0)}: {self.problems[0]}")
        named = masks.named
        if named is None and choice.mask_classes:
            named = NamedValues(dict(choice.mask_classes), "the training")
        self.are_named = named is not None
        self._found: MaskClasses = found_classes(
            self.counts, named, choice.ignore_index, masks.describe
        )

    @property
    def classes(self) -> tuple[str, ...]:
        return self._found.names

    @property
    def mask_values(self) -> tuple[int, ...]:
        return self._found.values

    @property
    def remark(self) -> str:
        return self._found.remark

    @cached_property
    def labels(self) -> Tensor:
        pixels = np.maximum(self.counts.sum(1, keepdims=True), 1)
        shares = self.counts[:, list(self.mask_values)] / pixels
        return torch.from_numpy(shares.astype(np.float32))

    @property
    def made_of(self) -> Sequence[Source]:
        return (self.images,)

    def fetch_ahead(self, indices: NDArray[np.int64]) -> bool:
        return fetch_ahead(self.images, indices)

    @property
    def names(self) -> Sequence[str]:
        return self.images.names

    @property
    def pixel_kind(self) -> PixelKind:
        return pixel_kind(self.images)

    @property
    def groups(self) -> Sequence[str] | None:
        return groups_of(self.images)

    @property
    def parts(self) -> Sequence[str] | None:
        return parts_of(self.images)

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return left_out(self.images)

    @property
    def content_sample(self) -> str:
        return content_sample(self.images)

    @property
    def image_blocks(self) -> NDArray[np.int64] | None:
        return image_blocks(self.images)

    @cached_property
    def fingerprint(self) -> str:
        facts = (
            f"{self.images.fingerprint} {self.masks.fingerprint} {self.classes} {self.mask_values}"
        )
        return hashlib.sha256(facts.encode() + self.labels.numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def describe(self, index: int) -> str:
        return self.images.describe(index)

    def file_at(self, index: int) -> Path | None:
        return file_of(self.images, index)

    def read(self, index: int) -> Stored:
        return self.images.read(index)

    def describe_mask(self, index: int) -> str:
        return self.masks.describe(index)

    def mask_problem(self, index: int) -> str | None:
        """What is wrong with a mask: damaged, or of another size than its image."""
        return self.problems.get(index)

    def mask_file_at(self, index: int) -> Path | None:
        return None if self.masks.file_at is None else self.masks.file_at(index)

    def read_mask(self, index: int) -> Mask:
        """(H, W) uint8, positions in `classes`, or IGNORED; DecodeError: damaged, or cannot be read."""
        return self._found.positions(_decoded(self.masks, index))

    @staticmethod
    def share_classes(sources: Sequence["MaskedSource"], choice: TargetChoice) -> None:
        """Give files that belong together the classes of all, where no file names them."""
        if any(source.are_named for source in sources):
            return
        counts = np.concatenate([source.counts for source in sources])
        starts = list(itertools.accumulate(map(len, sources), initial=0))

        def describe(index: int) -> str:
            part = bisect.bisect_right(starts, index) - 1
            return sources[part].describe_mask(index - starts[part])

        found = found_classes(counts, None, choice.ignore_index, describe)
        for source in sources:
            source._found = found


def _decoded(masks: Masks, index: int) -> Mask:
    try:
        return decoded_mask(masks.read(index))
    except OSError as error:
        raise DecodeError(f"its mask {masks.describe(index)}: {why_unreadable(error)}") from error
    except DecodeError as error:
        raise DecodeError(f"its mask {masks.describe(index)}: {error}") from error


def _counted(images: Source, masks: Masks) -> dict[str, NDArray[Any]]:
    """How many pixels of each mask have each number, and which masks are bad."""

    def build() -> dict[str, NDArray[Any]]:
        counts = np.zeros((len(images), 256), np.uint32)
        problems: dict[int, str] = {}
        with CountBar(len(images), unit="masks", shown=len(images) >= _MANY) as bar:

            def work(index: int) -> None:
                try:
                    mask = _decoded(masks, index)
                    require_same_size(mask, size_of(images.read(index)), masks.describe(index))
                    counts[index] = np.bincount(mask.ravel(), minlength=256)
                except OSError as error:
                    problems[index] = why_unreadable(error)
                except DecodeError as error:
                    problems[index] = str(error)
                bar.update()

            DecodePool().each(len(images), work)
        bad = sorted(problems)
        why = "".join(f"{problems[index]}\0" for index in bad).encode(errors="surrogateescape")
        return {
            "counts": counts,
            "bad": np.array(bad, np.int64),
            "why": np.frombuffer(why, np.uint8),
        }

    if masks.index is None:
        return build()
    stamp = f"{images.fingerprint} {masks.fingerprint} {masks.stamp}"
    found = stored_index(masks.index, build, kind=_KIND, stamp=stamp)
    # It lies among the data, and may come from elsewhere with them.
    return found if _is_plausible(found, len(images)) else build()


def _is_plausible(found: Mapping[str, NDArray[Any]], length: int) -> bool:
    """Whether what a file holds can be what `_counted` has kept there."""
    if found.keys() != {"counts", "bad", "why"}:
        return False
    counts, bad, why = found["counts"], found["bad"], found["why"]
    kinds = [one.dtype.name for one in (counts, bad, why)]
    if (
        kinds != ["uint32", "int64", "uint8"]
        or counts.shape != (length, 256)
        or bad.ndim != 1
        or why.ndim != 1
    ):
        return False
    return len(_texts(why)) == len(bad) and bool(((bad >= 0) & (bad < length)).all())


def _texts(array: NDArray[Any]) -> list[str]:
    return array.tobytes().decode(errors="surrogateescape").split("\0")[:-1]
