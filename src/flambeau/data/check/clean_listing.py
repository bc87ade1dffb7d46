"""A listing of the remaining images, as `flambeau train` reads it."""

import csv
import io
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flambeau.data.pack.output_files import write_classes, write_whole
from flambeau.data.sources.class_names_file import class_names_path, classes_file
from flambeau.data.sources.masks.mask_classes import names_in
from flambeau.data.sources.source import Source, file_of, mask_file_of, mask_values
from flambeau.data.sources.targets import groups_of, kind_of_targets, separator_of
from flambeau.errors import InputError, require_folder

_CONTROL = re.compile(r"[\x00-\x1f]")


def require_new(path: Path, source: Source, data: Path, *, force: bool) -> None:
    if path.suffix.lower() != ".csv":
        raise InputError(f"--out {path}: a listing is a CSV file; name it such as clean.csv")
    require_folder(path)
    if path.is_dir() or (path.exists() and not force):
        raise InputError(
            f"--out {path} exists\nName another file, or give --force to replace a listing"
        )
    if path.exists() and data.exists() and path.samefile(data):
        raise InputError(f"--out {path} is what is checked\nName another file")
    if file_of(source, 0) is None:
        raise InputError(
            f"--out lists image files, and {data} holds its images itself\n"
            f"Unpack it, and check the folder: flambeau pack {data} FOLDER"
        )


def write_listing(
    path: Path,
    source: Source,
    is_val: NDArray[np.bool_],
    drop: Collection[int],
    *,
    group: str | None = None,
) -> int:
    """Write path, targets, column `group` and split of all images but `drop`; whole or not."""
    folder = path.absolute().parent
    kept = [number for number in range(len(source)) if number not in drop]
    if all(is_val[number] for number in kept):
        raise InputError(
            "--out would leave no image to train on: all have findings\n"
            "Look at what was found, or name fewer kinds with --drop"
        )
    kind = kind_of_targets(source)
    masks = [mask_file_of(source, number) for number in range(len(source))]
    if None in masks:
        heads, cells = kind.cells(source.classes, source.labels, separator_of(source))
    else:
        heads = ["mask"]
        cells = [[str(_below(folder, mask))] for mask in masks if mask is not None]
        _write_mask_names(path, source)
    names_path = None
    if not kind.is_table:
        _check_left(kept, source.labels.tolist(), is_val, source.classes)
        names_path = _class_names_path(path, source.classes)
        if names_path is not None and all(name.isdecimal() for name in source.classes):
            cells = [[str(label)] for label in source.labels.tolist()]
    groups = groups_of(source)
    if group is not None and groups is not None and group not in heads:
        heads = [*heads, group]
        cells = [[*row, name] for row, name in zip(cells, groups, strict=True)]
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", *heads, "split"])
    for number in kept:
        part = "val" if is_val[number] else "train"
        image = _checked(_relative_path(folder, source, number))
        rows.writerow([image, *map(_checked, cells[number]), part])
    if names_path is not None:
        write_classes(names_path, source.classes)
    write_whole(path, text.getvalue())
    return len(kept)


def _write_mask_names(path: Path, source: Source) -> None:
    """Write the names of the numbers in masks beside the listing, unless a file there has them."""
    names = dict(zip(mask_values(source), source.classes, strict=True))
    known = classes_file(path)
    if known.is_file() and names_in(known).names == names:
        return
    file = path.with_name(f"{path.stem}.classes.txt")
    if file.exists():
        raise InputError(f"{file} exists and names other classes\nName another --out")
    write_whole(file, "".join(f"{value} {name}\n" for value, name in names.items()))


def _class_names_path(path: Path, classes: Sequence[str]) -> Path | None:
    """The file of class names to write beside the listing; None if its labels are the names.

    Labels that are numbers need one, and an existing file of names would be read in any case.
    """
    if not all(name.isdecimal() for name in classes) and not classes_file(path).exists():
        return None
    return class_names_path(path, classes)


def _relative_path(folder: Path, source: Source, number: int) -> Path:
    file = file_of(source, number)
    assert file is not None
    return _below(folder, file)


def _below(folder: Path, file: Path) -> Path:
    """A file relative to a folder, if it lies in it."""
    file = file.absolute()
    return file.relative_to(folder) if file.is_relative_to(folder) else file


def _check_left(
    kept: Sequence[int], labels: Sequence[int], is_val: NDArray[np.bool_], classes: Sequence[str]
) -> None:
    left = {labels[number] for number in kept if not is_val[number]}
    for label in set(labels) - left:
        raise InputError(
            f"--out would leave no image of class {classes[label]!r} to train on: all have findings\n"
            "Look at what was found, add images, or name fewer kinds with --drop"
        )


def _checked(text: object) -> str:
    word = str(text)
    is_text = word.encode(errors="ignore").decode() == word
    if word != word.strip() or not is_text or _CONTROL.search(word) or "://" in word:
        raise InputError(
            f"{word!a} cannot stand in a listing: it begins or ends with a space, or is no plain text\n"
            "Rename it"
        )
    return word
