"""Which number in the masks stands for which class, from a file of names or from the numbers that occur."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flambeau.data.sources.masks.mask_file import IGNORED, Mask
from flambeau.errors import InputError
from flambeau.images.native import kernel as native

# In a folder of images and masks; ADE20K's and CamVid's, too.
_NAME_FILES = ("classes.txt", "class_names.txt", "labels.txt", "codes.txt", "objectInfo150.txt")
_NUMBERED = re.compile(r"(\d{1,3})(?:\s*[,:;\t]\s*|\s+)(.*\S)")
_TWO = ("background", "foreground")

# Of Pascal VOC, whose folder does not name them: Everingham et al., "The Pascal Visual Object Classes
# challenge: a retrospective", IJCV 2015, table 1, in alphabetical order after the background.
VOC_CLASSES = (
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)


class NamedValues(NamedTuple):
    """The names of the numbers in masks; `whose`: who names them, a file or data set."""

    names: dict[int, str]
    whose: str


@dataclass(frozen=True)
class MaskClasses:
    """The classes of the pixels.

    Attributes:
        values: the number of each in the masks.
        ignored: numbers that occur and do not count.
        remark: how they were found, for a training's first lines.
    """

    names: tuple[str, ...]
    values: tuple[int, ...]
    ignored: tuple[int, ...]
    remark: str

    def positions(self, mask: Mask) -> Mask:
        """(H, W) positions in `names`, IGNORED for every other number."""
        num = len(self.values)
        kernel = native.kernel()
        if kernel is not None:
            return kernel.renumbered(mask, self._table)
        if self.values == tuple(range(num)) and ((mask < num) | (mask == IGNORED)).all():
            return mask
        return np.take(self._table, mask)

    @cached_property
    def _table(self) -> Mask:
        table = np.full(256, IGNORED, np.uint8)
        table[list(self.values)] = np.arange(len(self.values))
        return table


def names_beside(folder: Path) -> NamedValues | None:
    """The names in a file of a folder, as `names_in` reads it; None without one."""
    path = next((folder / name for name in _NAME_FILES if (folder / name).is_file()), None)
    return None if path is None else names_in(path)


def names_in(path: Path) -> NamedValues:
    """The names in a file.

    Each line is a name, of 0, 1, 2 and so on, or a number and its name; ADE20K's table has the number in the
    first column.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}\nSave it as UTF-8") from error
    lines = [line.strip() for line in lines if line.strip()]
    if lines and lines[0].split()[0].lower() in ("idx", "index", "value", "id"):
        del lines[0]
    numbered = [_NUMBERED.fullmatch(line) for line in lines]
    names: dict[int, str] = {}
    for at, (line, found) in enumerate(zip(lines, numbered, strict=True)):
        value = at
        name = line
        if found is not None and None not in numbered:
            value = int(found[1])
            name = found[2].split("\t")[-1].strip()
        if value in names:
            raise InputError(
                f"{path} names the number {value} twice: {names[value]!r} and {name!r}"
            )
        if name in names.values():
            raise InputError(f"{path} gives two numbers the name {name!r}\nA class has one number")
        if value > 255:
            raise InputError(
                f"{path} names {value + 1} numbers or more; those of masks are in 0 .. 255"
            )
        names[value] = name
    if not names:
        raise InputError(
            f"{path} names no class\nExpected a name per line, or a number and its name"
        )
    return NamedValues(names, str(path))


def found_classes(
    counts: NDArray[np.uint32],
    named: NamedValues | None,
    ignore: int | None,
    describe: Callable[[int], str],
) -> MaskClasses:
    """The classes of masks, by (N, 256) counts of the numbers in each.

    `ignore`: None is 255, unless it has a name. InputError: a number without a name, or nothing left to
    learn.
    """
    used = [int(value) for value in np.flatnonzero(counts.sum(0))]
    if not used:
        raise InputError(f"{describe(0)}: no mask can be read")
    if named is not None:
        return _by_names(counts, used, named, ignore, describe)
    if ignore is None and used in ([0, 255], [0, 1]):
        remark = f"masks of {used[0]} and {used[1]}: {_TWO[0]} and {_TWO[1]}"
        return MaskClasses(_TWO, tuple(used), (), remark)
    left_out = IGNORED if ignore is None else ignore
    values = tuple(value for value in used if value != left_out)
    if not values:
        raise InputError(
            f"{describe(0)}: all pixels of all masks are {left_out}, which is ignored\n"
            "Name another number with --ignore-index, or give masks with classes"
        )
    remark = (
        f"classes by the numbers in the masks, {_ranges(values)}; a file classes.txt names them"
    )
    ignored = (left_out,) if left_out in used else ()
    return MaskClasses(tuple(map(str, values)), values, ignored, remark)


def _by_names(
    counts: NDArray[np.uint32],
    used: Sequence[int],
    named: NamedValues,
    ignore: int | None,
    describe: Callable[[int], str],
) -> MaskClasses:
    names = {value: name for value, name in named.names.items() if value != ignore}
    left_out = {IGNORED if ignore is None else ignore} - {*names}
    # ADE20K's 0 is everything that has no name.
    if 0 not in named.names and 1 in named.names and ignore is None:
        left_out.add(0)
    unknown = next((value for value in used if value not in names and value not in left_out), None)
    if unknown is not None:
        mask = int(np.flatnonzero(counts[:, unknown])[0])
        raise InputError(
            f"{describe(mask)}: {counts[mask, unknown]} pixels are {unknown}, which {named.whose} does not "
            f"name ({_ranges(sorted(names))})\n"
            "Correct the mask, name the number there (a line NUMBER NAME), or leave it out with "
            f"--ignore-index {unknown}"
        )
    values = tuple(sorted(names))
    ignored = tuple(value for value in used if value in left_out)
    remark = f"classes by {named.whose}"
    return MaskClasses(tuple(names[value] for value in values), values, ignored, remark)


def _ranges(values: Sequence[int]) -> str:
    """Such as '0 to 20' or '1, 2, 5'."""
    if len(values) > 2 and values[-1] - values[0] == len(values) - 1:
        return f"{values[0]} to {values[-1]}"
    shown = ", ".join(map(str, values[:12]))
    return f"{shown} ..." if len(values) > 12 else shown
