"""Class names of packed images: the lines of a text file beside them, or the labels themselves."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flambeau.errors import InputError

# In lower case.
IMAGE_FOLDERS = (
    "image",
    "images",
    "img",
    "imgs",
    "input",
    "inputs",
    "jpegimages",
    "photos",
    "pictures",
)
_PART_FOLDERS = (
    "dev",
    "eval",
    "evaluation",
    "holdout",
    "test",
    "testing",
    "train",
    "training",
    "trainval",
    "unlabeled",
    "unlabelled",
    "val",
    "valid",
    "validation",
)
TARGET_FOLDERS = (
    "annotation",
    "annotations",
    "boxes",
    "ground_truth",
    "groundtruth",
    "gt",
    "imagesets",
    "label",
    "labels",
    "mask",
    "masks",
    "segmentation",
    "segmentationclass",
    "segmentationobject",
    "segmentations",
    "targets",
    "trimaps",
    "xmls",
)

_MAX_LABEL = 1 << 24  # some formats hold a label as float32, which is exact up to here
# From so many classes on one in so many must have an image, or the numbers are others, such as of persons.
_MANY_CLASSES = 1 << 20
_SPARSE = 64


def classes_file(path: Path) -> Path:
    """The file of a packed file's class names, or the one to write.

    NAME.classes.txt beside NAME.EXT, NAME_train.EXT or NAME_val.EXT (also with - or . for _, and a shard's
    number behind); else that of NAME up to its first dot, as version 0.1 wrote it; else classes.txt in the
    folder.
    """
    named, *others = class_name_files(path) if path.is_file() else _candidates(path)
    return next((file for file in (named, *others) if file.exists()), named)


def class_name_files(path: Path) -> list[Path]:
    """The files that may hold a packed file's class names; the first counts."""
    named, shared = _candidates(path)
    old = path.with_name(f"{_family(path.name.partition('.')[0])}.classes.txt")
    return [*dict.fromkeys((named, old, shared))]


def class_names_path(path: Path, classes: Sequence[str]) -> Path | None:
    """The file for the class names of a packed file; None if readers have them already."""
    if not classes:
        return None
    for name in classes:
        if name != name.strip() or len(name.splitlines()) != 1:
            raise InputError(
                f"class {name!r} cannot be a line of a text file\nGive it another name"
            )
    named, shared = _candidates(path)
    known = _read(named)
    if known is not None and known != tuple(classes):
        raise InputError(f"{named} exists and names other classes\nName another DST")
    with contextlib.suppress(InputError):  # a malformed classes.txt, which `named` overrides
        known = known or _read(shared)
    return None if known == tuple(classes) else named


def _candidates(path: Path) -> tuple[Path, Path]:
    """The classes file of this packed file, and the one shared by its folder."""
    stem = path.name.removesuffix(path.suffix)
    return path.with_name(f"{_family(stem)}.classes.txt"), path.with_name("classes.txt")


def _family(stem: str) -> str:
    """A stem without the suffixes of shards and parts."""
    return re.sub(r"([-_](\d+|of|train|val|test)|\.(train|val|test))+$", "", stem) or stem


def named_labels(
    labels: Sequence[int | str],
    path: Path,
    describe: Callable[[int], str],
    *,
    labelled: bool = True,
    by_folder: bool = False,
    may_be_several: bool = False,
) -> tuple[tuple[str, ...], Tensor]:
    """Class names, and the labels as positions in them.

    Numbers are lines of the classes file, from 0; without it the numbers up to the largest are the names.
    Words are class names, in the order of the classes file, else in alphabetical order.

    Args:
        labels: of all images, all numbers or all words.
        labelled: False gives all images the class ''.
        by_folder: they are names of folders. Others are refused if they look like several labels.
        may_be_several: the user says that each is one class, whatever it looks like.
    """
    if not labels or not labelled:
        return unlabelled(len(labels), path)
    known = known_classes(path)
    if known is not None:
        return chosen_labels(labels, known, str(classes_file(path)), describe)
    if isinstance(labels[0], str):
        if by_folder:
            refuse_pairs(tuple(map(str, labels)), path)
        elif not may_be_several:
            _refuse_several(labels, path, describe)
        return chosen_labels(labels, sorted(set(map(str, labels))), str(path), describe)
    # Compared in Python: a label from a damaged file may be too large for a tensor.
    at = next((k for k, label in enumerate(labels) if not 0 <= int(label) < _MAX_LABEL), None)
    if at is not None:
        raise InputError(
            f"{describe(at)}: label {labels[at]}\n"
            f"A label is the number of a class: 0, 1, 2, ... below {_MAX_LABEL}"
        )
    numbers = torch.tensor(labels)
    count = int(numbers.max()) + 1
    if count > _MANY_CLASSES:
        _refuse_sparse(numbers, describe)
    return tuple(map(str, range(count))), numbers


def _refuse_sparse(numbers: Tensor, describe: Callable[[int], str]) -> None:
    """InputError: so few of the numbers up to the largest occur that they are of something else."""
    largest = int(numbers.max())
    distinct = len(numbers.unique())
    if largest >= _SPARSE * distinct:
        raise InputError(
            f"{describe(int(numbers.argmax()))}: label {largest}, and only {distinct} "
            f"label{'s are' if distinct > 1 else ' is'} different\n"
            "A number is that of a class, 0, 1, 2, ...; if these are other numbers, such as of persons or "
            f"products, write them as words: id{largest}"
        )


def chosen_labels(
    labels: Sequence[int | str], classes: Sequence[str], whose: str, describe: Callable[[int], str]
) -> tuple[tuple[str, ...], Tensor]:
    """As `named_labels`, with given class names."""
    if len(set(classes)) < len(classes):
        twice = next(name for name in classes if classes.count(name) > 1)
        raise InputError(f"{whose} names class {twice!r} twice; a class has one name of its own")
    positions = {name: position for position, name in enumerate(classes)}
    numbers = [positions.get(label, -1) if isinstance(label, str) else label for label in labels]
    for index, number in enumerate(numbers):
        if not 0 <= number < len(classes):
            raise InputError(
                f"{describe(index)}: label {labels[index]!r} is none of the {len(classes)} classes "
                f"that {whose} names\n"
                "Expected one of the names, or its place among them, counted from 0"
            )
    return tuple(classes), torch.tensor(numbers, dtype=torch.int64)


def _refuse_several(
    labels: Sequence[int | str], path: Path, describe: Callable[[int], str]
) -> None:
    """InputError for a text that is several labels.

    `|` and `;` separate labels. A comma, a blank, +, & or / do so only if all parts are labels of other
    images, or numbers: names of ImageNet's classes hold commas.
    """
    words = dict.fromkeys(label for label in labels if isinstance(label, str))
    several = next((word for word in words if _is_several(word, words)), None)
    if several is not None:
        raise InputError(
            f"{describe(labels.index(several))}: label {several!r} looks like several labels\n"
            f"A classifier needs one for each image; if it is one name, write it into {classes_file(path)}; "
            "if images of your table may have several, give --task multilabel"
        )


def _is_several(word: str, words: Container[str]) -> bool:
    if re.search(r"[^|;][|;][^|;]|^\[.*,.*\]$", word):
        return True
    for separator in (r",\s*", r"\s+", r"\s*[+&/]\s*"):
        parts = re.split(separator, word)
        if len(parts) > 1 and all(part in words for part in parts):
            return True
    return re.fullmatch(r"\d+([,\s]+\d+)+", word) is not None


def refuse_pairs(classes: Sequence[str], path: Path) -> None:
    """InputError for folders of parts, or images and masks or annotations, which are no classes."""
    names = sorted(set(classes))
    if len(names) > 1 and all(name.lower() in _PART_FOLDERS for name in names):
        raise InputError(
            f"{path}: {names[0]}/ and {names[1]}/ look like parts of the data, not like two classes\n"
            "Call the images to train on train/ and those to validate on val/, with a folder per class in "
            "each; to train these as classes all the same, rename one"
        )
    images = [name for name in names if name.lower() in IMAGE_FOLDERS]
    others = [name for name in names if name not in images]
    if images and others and all(name.lower() in TARGET_FOLDERS for name in others):
        raise InputError(
            f"{path}: {images[0]}/ and {others[0]}/ look like images and what belongs to them, "
            "as for segmentation or detection, not like two classes\n"
            "A classifier needs one folder per class; to train these as classes all the same, rename one"
        )


def unlabelled(count: int, path: Path) -> tuple[tuple[str, ...], Tensor]:
    """The class '', and its number for each of `count` images; InputError for none."""
    if not count:
        raise InputError(f"{path} holds no images")
    return ("",), torch.zeros(count, dtype=torch.int64)


def known_classes(path: Path) -> tuple[str, ...] | None:
    """The names in the classes file of a packed file; None without one."""
    return _read(classes_file(path))


def _read(path: Path) -> tuple[str, ...] | None:
    if not path.exists():
        return None
    try:
        lines = path.read_text(encoding="utf-8-sig").rstrip().splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}") from error
    names = {line.strip(): number for number, line in enumerate(lines, start=1)}
    if "" in names:
        raise InputError(f"{path}, line {names['']} is empty; expected one class per line")
    if len(names) < len(lines):
        (name, _), *_ = Counter(map(str.strip, lines)).most_common(1)
        raise InputError(f"{path} names class {name!r} twice; expected one class per line")
    return tuple(names)
