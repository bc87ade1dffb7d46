"""Labelled images listed in a text file: .csv and .tsv tables, and MXNet's .lst.

Quotes follow RFC 4180, and .lst files mxnet 1.9.1 tools/im2rec.py: index, labels and path, between tabs.
"""

import contextlib
import csv
import hashlib
import itertools
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TextIO

import torch

from flambeau.data.sources.class_names_file import classes_file, known_classes, named_labels
from flambeau.data.sources.fingerprint import sampled_content, size_of
from flambeau.data.sources.folder import IMAGE_SUFFIXES, images_below
from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.masks.mask_classes import names_beside, names_in
from flambeau.data.sources.masks.masked_source import MaskedSource, masks_in_files
from flambeau.data.sources.source import Source, SubsetSource
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import (
    FOUND,
    TargetChoice,
    is_indicator,
    named_column,
    table_targets,
)
from flambeau.data.sources.vector_targets import Hot, label_value, vector_targets
from flambeau.errors import InputError, unreadable
from flambeau.regular_file import read_file

# Headers in lower case, letters only, singular; if a file has several, the first one here is used.
_PATH = (
    "path",
    "filepath",
    "file",
    "filename",
    "image",
    "imagepath",
    "imagefile",
    "imagename",
    "img",
    "imgpath",
    "imgname",
    "url",
    "imageurl",
    "路径",
    "文件",
    "文件名",
    "图像",
    "图片",
)
_LABEL = ("label", "class", "target", "category", "classname", "labelname", "tag", "标签", "类别")
_MASK = ("mask", "maskpath", "maskfile", "maskname", "segmentation", "annotation", "掩码", "掩膜")
_SPLIT = ("split", "subset", "partition", "dataset", "set")

# Common names of the parts of a data set.
PARTS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
_CONTROL = re.compile(r"[\x00-\x1f]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


_Record = tuple[int, list[str]]  # number of its first line, and its values


class _Row(NamedTuple):
    line: int
    name: str
    targets: tuple[str, ...]  # '' for an empty cell; none if it has no column for them
    part: str  # train, val or test; '' in a file that does not say
    group: str = ""


class _Columns(NamedTuple):
    line: int  # the first of the file
    width: int
    name: int
    targets: tuple[int, ...]
    part: int | None
    header: Sequence[str] = ()  # empty if the file has none
    is_guess: bool = False  # no name says that these are targets
    are_masks: bool = False  # the targets are the paths of masks
    group: int | None = None

    def title(self, at: int) -> str:
        """The name or number of a column of targets."""
        return self.header[self.targets[at]] if self.header else f"{self.targets[at] + 1}"

    @property
    def unread(self) -> tuple[str, ...]:
        read = (self.name, *self.targets, self.part, self.group)
        return tuple(name for at, name in enumerate(self.header) if at not in read)


class ListingSource:
    """Images listed in a text file, one per line.

    A .csv has commas, or semicolons or tabs if its first line has no comma; a .tsv has tabs; both may quote.
    Columns are path and label, unless a first line names them: `path` or `file`, `filename`, `image`; `label`
    or `class`, `target`, `category`; and `split` (see `open_listing`). A .lst has an ignored index, one label
    or several numbers (see `vector_targets`), and the path. Labels are read as in `named_labels`; several per
    image, and numbers that are no classes, as in `table_targets`. Without a column of labels, columns of 0
    and 1 alone are labels. A column `mask` without one of labels has the paths of masks, for segmentation. A
    path must not be repeated: one copy could be held out of training, and the other not.

    Args:
        labelled: False for images to predict on: a line may be a path alone, and paths may repeat; without a
            label, or with several in a .lst, an image is of class ''; other labels are class names as they
            are.
        whole_folder: files of its folder that it does not list count as left out.

    Attributes:
        parts: train, val or test for each image; None without a column for it.
        mask_names: the masks' paths as they stand there; None without a column of them.
        groups: of each image; None unless `choice` names a column.
    """

    def __init__(
        self,
        path: Path,
        *,
        labelled: bool = True,
        whole_folder: bool = False,
        are_here: bool = True,
        choice: TargetChoice = FOUND,
    ) -> None:
        self.path = path.absolute()
        with _opened(path) as file:
            columns, records = _columns_and_records(path, file, choice, labelled=labelled)
            rows = list(_rows(path, columns, records, labelled=labelled, are_here=are_here))
        self._lines = array("Q", [row.line for row in rows])
        self.names: tuple[str, ...] = tuple(row.name for row in rows)
        self.task: TaskName = "classification"
        self.separator: str | None = None
        self.mask_names: tuple[str, ...] | None = None
        if columns is not None and columns.are_masks:
            self.mask_names = tuple(row.targets[0] for row in rows)
            rows = [row._replace(targets=()) for row in rows]
        elif columns is not None and columns.is_guess:
            columns, rows = _only_indicators(path, columns, rows)
        has_labels = labelled and self.mask_names is None
        self._read_targets(rows, columns, choice, labelled=has_labels)
        self.parts = tuple(row.part for row in rows) if rows[0].part else None
        has_groups = columns is not None and columns.group is not None
        self.groups = tuple(row.group for row in rows) if has_groups else None
        if are_here:
            self._require_any()
        unread = () if columns is None else columns.unread
        self.left_out: tuple[LeftOut, ...] = (LeftOut(str(path), columns=unread),)
        if whole_folder:
            self.left_out += (self._unlisted(),)

    def _read_targets(
        self,
        rows: Sequence[_Row],
        columns: _Columns | None,
        choice: TargetChoice,
        *,
        labelled: bool,
    ) -> None:
        def cell(row: int, at: int = 0) -> str:
            where = self.describe(row)
            return where if columns is None else f"{where}, column {columns.title(at)}"

        if labelled and columns is not None and rows:
            texts = [*zip(*(row.targets for row in rows), strict=True)]
            names = [columns.title(at) for at in range(len(texts))]
            targets = table_targets(texts, names, choice, cell, known_classes(self.path))
            if targets is not None:
                self.task, self.classes, self.labels, self.separator = targets
                return
        if labelled and columns is None and self._read_vectors(rows, choice):
            return
        labels = ["".join(row.targets) for row in rows]
        if labelled and "" in labels:
            where = f"{self.path}, line {self._lines[labels.index('')]}"
            raise InputError(
                f"{where} has no label\nExpected an image and its class; if an image may have several labels "
                "or none, give --task multilabel; if numbers are to be learned, --task regression"
            )
        try:
            self.classes, self.labels = named_labels(
                numbers_or_words(labels, cell),
                self.path,
                cell,
                may_be_several=choice.task == "classification",
            )
        except InputError:
            if labelled or not rows:
                raise
            self.classes = tuple(sorted(set(labels)))
            number = {name: position for position, name in enumerate(self.classes)}
            self.labels = torch.tensor([number[text] for text in labels])

    def _read_vectors(self, rows: Sequence[_Row], choice: TargetChoice) -> bool:
        """Whether the numbers of a .lst are several labels of each image, or to be learned themselves."""
        texts = [row.targets for row in rows]
        if not all(_NUMBER.fullmatch(text) for one in texts for text in one):
            return False
        values = [label_value(torch.tensor(list(map(float, one)))) for one in texts]
        found = vector_targets(values, self.path, choice, self.describe, said=None)
        if found is not None:
            self.task, self.classes, self.labels, self.separator = found
            return True
        row = next((at for at, one in enumerate(texts) if len(one) > 1), None)
        if row is None:
            return False
        classes = [value.at for value in values if isinstance(value, Hot)]
        if len(classes) < len(values):
            raise InputError(
                f"{self.path}, line {self._lines[row]} has {len(texts[row])} labels, which may be labels of "
                "0 and 1, numbers, or boxes\nSay what they are: --task multilabel or --task regression"
            )
        self.classes, self.labels = named_labels(classes, self.path, self.describe)
        return True

    def __len__(self) -> int:
        return len(self.names)

    def describe(self, index: int) -> str:
        return f"{self.file_at(index)} ({self.path}, line {self._lines[index]})"

    def read(self, index: int) -> bytes:
        return read_file(self.file_at(index))

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.classes}\n".encode())
        for index, label in enumerate(self.labels.tolist()):
            size = size_of(self.file_at(index))
            digest.update(f"{self.names[index]}\0{size}\0{label}\n".encode())
        return digest.hexdigest()

    @cached_property
    def content_sample(self) -> str:
        return sampled_content(len(self), self.file_at)

    def file_at(self, index: int) -> Path:
        return self.path.parent / self.names[index]

    def _unlisted(self) -> LeftOut:
        folder = self.path.parent
        names, others = images_below(folder)
        listed = {os.path.normpath(name) for name in self.names}
        for name in names:
            if os.path.normpath(name) not in listed:
                others.add(os.path.splitext(name)[1].lower(), folder / name)  # noqa: PTH122
        others.counts -= Counter([self.path.suffix.lower()])
        return others

    def _require_any(self) -> None:
        # Not Path.exists, which raises for a folder without permission or a name that is too long.
        if not any(os.path.exists(self.file_at(index)) for index in range(len(self))):  # noqa: PTH110
            more = f", nor does any other of the {len(self)} listed images" if len(self) > 1 else ""
            windows = "Write / for each \\ of Windows; " * ("\\" in self.names[0])
            start = f"{windows}paths start at the folder of the listing"
            raise InputError(
                f"{self.describe(0)} does not exist{more}\n"
                f"{start[:1].upper()}{start[1:]}, {self.path.parent}: move it, or fix the paths"
            )


def open_listing(
    path: Path, *, labelled: bool = True, whole_folder: bool = False, choice: TargetChoice = FOUND
) -> tuple[Source, Source | None]:
    """The images of a listing, or those to train and to validate on by a column `split`.

    The latter are the rows of `val` (valid, validation, dev), or without any those of `test`, else left out.
    Rows of a single part are all of the images.
    """
    source = ListingSource(path, labelled=labelled, whole_folder=whole_folder, choice=choice)
    if source.mask_names is None:
        return split(source, source.parts)
    return split(_with_masks(source, source.mask_names, choice), source.parts)


def _with_masks(listing: ListingSource, names: Sequence[str], choice: TargetChoice) -> MaskedSource:
    path = listing.path
    empty = next((at for at, name in enumerate(names) if not name), None)
    if empty is not None:
        raise InputError(f"{listing.describe(empty)} has no mask\nGive it one, or remove the line")
    names_file = classes_file(path)
    named = names_in(names_file) if names_file.is_file() else names_beside(path.parent)
    files = [path.parent / name for name in names]
    masks = masks_in_files(files, names, index=path, named=named)
    return MaskedSource(listing, masks, choice)


def split(source: Source, parts: Sequence[str] | None) -> tuple[Source, Source | None]:
    """A source, or its images to train and to validate on by `parts`: train, val or test."""
    if parts is None or "train" not in parts or len(set(parts)) == 1:
        return source, None
    val = "val" if "val" in parts else "test"
    train_indices = [index for index, part in enumerate(parts) if part == "train"]
    val_indices = [index for index, part in enumerate(parts) if part == val]
    return (
        SubsetSource(source, torch.tensor(train_indices)),
        SubsetSource(source, torch.tensor(val_indices)),
    )


def numbers_or_words(
    texts: Sequence[str], describe: Callable[[int], str]
) -> Sequence[int] | Sequence[str]:
    """Labels written as text: integers if all are numbers, such as 3 and 3.0, else unchanged."""
    if not all(map(_NUMBER.fullmatch, texts)):
        return texts
    numbers = list(map(float, texts))
    for index, number in enumerate(numbers):
        if not number.is_integer() or abs(number) > 1 << 53:
            raise InputError(
                f"{describe(index)}: label {texts[index]}\n"
                "A label is the number of a class: 0, 1, 2, ..., or its name"
            )
    return list(map(int, numbers))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error}\nSave it as UTF-8") from error


def has_columns(path: Path, choice: TargetChoice = FOUND) -> bool:
    """Whether the first line of a .csv or .tsv names a column of paths and some of targets."""
    with _opened(path) as file:
        records = _records(path, file)
        first = next(records, None)
        columns = None if first is None else _header(path, *first, choice, labelled=True)
        if columns is None or not columns.is_guess:
            return columns is not None
        return len(_indicators(columns, list(_table_rows(path, columns, records)))) > 1


def _indicators(columns: _Columns, rows: Sequence[_Row]) -> list[int]:
    """Which of the columns of targets hold 0, 1 and empty cells alone."""
    texts = zip(*(row.targets for row in rows), strict=True)
    return [at for at, cells in enumerate(texts) if is_indicator(cells)]


def _only_indicators(
    path: Path, columns: _Columns, rows: Sequence[_Row]
) -> tuple[_Columns, list[_Row]]:
    """With the columns of labels alone, of a header that names no targets."""
    kept = _indicators(columns, rows)
    if len(kept) < 2:
        others = ", ".join(columns.title(at) for at in range(len(columns.targets)))
        raise InputError(
            f"{path}, line {columns.line} names no column of labels (others: {others or 'none'})\n"
            "Call it label, or name what is to be learned: --target COLUMN, or several with commas"
        )
    columns = columns._replace(targets=tuple(columns.targets[at] for at in kept))
    return columns, [row._replace(targets=tuple(row.targets[at] for at in kept)) for row in rows]


def _rows(
    path: Path,
    columns: _Columns | None,
    records: Iterator[_Record],
    *,
    labelled: bool,
    are_here: bool,
) -> Iterator[_Row]:
    """The images of a listing; repeated paths are refused if there are labels."""
    seen: dict[str, int] = {}
    if columns is None:
        rows = _lst_rows(path, records, labelled=labelled)
    else:
        rows = _table_rows(path, columns, records)
    for row in rows:
        where = f"{path}, line {row.line}"
        name = row.name
        if not name:
            raise InputError(f"{where} has no path\nExpected an image and its class")
        if _CONTROL.search("".join((name, *row.targets))):
            raise InputError(f"{where} has a line break or control character in a value\nRemove it")
        if "://" in name and are_here:
            raise InputError(f"{where} is a URL: {name}\nDownload the images and list their paths")
        first = seen.setdefault(os.path.normpath(name), row.line) if labelled else row.line
        if first != row.line:
            raise InputError(
                f"{where} lists {name} again, after line {first}\nExpected each image once, with one label"
            )
        yield row


def _is_lst(path: Path) -> bool:
    return path.suffix.lower() == ".lst"


def _records(path: Path, file: TextIO) -> Iterator[_Record]:
    """The lines that are not empty; a line break in quotes does not end a line."""
    delimiter = "\t"
    if path.suffix.lower() == ".csv":
        first = next((line for line in file if line.strip()), "")
        file.seek(0)
        # Spreadsheets write semicolons in countries with a decimal comma.
        delimiter = next((mark for mark in ",;\t" if mark in first), ",")
    reader = csv.reader(
        file,
        delimiter=delimiter,
        quoting=csv.QUOTE_NONE if _is_lst(path) else csv.QUOTE_MINIMAL,
        skipinitialspace=True,
        strict=True,
    )
    while True:
        line = reader.line_num + 1
        try:
            values = [value.strip() for value in next(reader)]
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{path}, line {line}: {error}\n"
                'A value in quotes ends with a quote, and "" is a quote in it'
            ) from error
        if any(values):
            yield line, values


def _lst_rows(path: Path, records: Iterable[_Record], *, labelled: bool) -> Iterator[_Row]:
    for line, values in records:
        if len(values) < 2 + labelled or not _NUMBER.fullmatch(values[0]):
            raise InputError(
                f"{path}, line {line}: {' '.join(values)[:80]!r}\n"
                f"Expected index{', label' * labelled} and path, with tabs between them"
            )
        labels = tuple(values[1:-1])
        if labelled and len(labels) > 1 and not all(map(_NUMBER.fullmatch, labels)):
            raise InputError(
                f"{path}, line {line} has {len(labels)} labels, and not all of them are numbers\n"
                "Expected a class, or 0 and 1 for each label, or the numbers to be learned"
            )
        yield _Row(line, values[-1], labels if labelled or len(labels) == 1 else ("",), "")


def _columns_and_records(
    path: Path, file: TextIO, choice: TargetChoice, *, labelled: bool
) -> tuple[_Columns | None, Iterator[_Record]]:
    """The columns of a table, None of a .lst; and its lines of images."""
    records = _records(path, file)
    first = None if _is_lst(path) else next(records, None)
    if first is None:
        return None, records
    columns = _header(path, *first, choice, labelled=labelled)
    if columns is not None:
        return columns, records
    _require_image(path, *first, labelled=labelled)
    columns = _Columns(first[0], len(first[1]), 0, (1,) if len(first[1]) == 2 else (), None)
    return columns, itertools.chain([first], records)


def _table_rows(path: Path, columns: _Columns, records: Iterator[_Record]) -> Iterator[_Row]:
    for line, values in records:
        if len(values) != columns.width:
            raise InputError(
                f"{path}, line {line} has {len(values)} values, line {columns.line} has {columns.width}\n"
                'A value that holds a comma stands in quotes: "a, b.jpg",cat'
            )
        part = ""
        if columns.part is not None:
            part = PARTS.get(values[columns.part].lower(), "")
            if not part:
                raise InputError(
                    f"{path}, line {line}: {values[columns.part]!r} is no part of the data\n"
                    f"Expected one of {', '.join(PARTS)} in that column"
                )
        targets = tuple(values[at] for at in columns.targets)
        group = "" if columns.group is None else values[columns.group]
        if columns.group is not None and not group:
            raise InputError(
                f"{path}, line {line} names no group\nGive each image the group that it belongs to"
            )
        yield _Row(line, values[columns.name], targets, part, group)


def _header(
    path: Path, line: int, values: Sequence[str], choice: TargetChoice, *, labelled: bool
) -> _Columns | None:
    """The columns that a first line names; None if it is no header."""
    words = [re.sub(r"[\W_]", "", value.lower()) for value in values]

    def column(names: Sequence[str]) -> int | None:
        for name in names:
            matches = [
                at for at, word in enumerate(words) if word in (name, f"{name}s", f"{name}es")
            ]
            if len(matches) > 1:
                raise InputError(
                    f"{path}, line {line} names two columns {name}\nRename one of them"
                )
            if matches:
                return matches[0]
        return None

    name = column(_PATH)
    names = f"{path}, line {line} names"

    def of_choice(wanted: str | None) -> int | None:
        if wanted is None or (choice.of_others and wanted not in values):
            return None
        return named_column(wanted, values, names)

    mask = column(_MASK)
    part = column(_SPLIT) if choice.split is None else of_choice(choice.split)
    group = of_choice(choice.group)
    is_row = any(map(_is_image, values))  # an image of class 'image'
    if name is None:
        return None
    label = column(_LABEL)
    if choice.task == "segmentation" and choice.columns and not choice.of_others:
        mask = named_column(choice.columns[0], values, names)
    wants_masks = choice.task == "segmentation" or (choice.task is None and label is None)
    if mask is not None and wants_masks and labelled:
        head = tuple(values)
        return _Columns(line, len(values), name, (mask,), part, head, are_masks=True, group=group)
    if choice.columns and labelled:
        targets = tuple(named_column(wanted, values, names) for wanted in choice.columns)
        return _Columns(line, len(values), name, targets, part, tuple(values), group=group)
    if label is None and is_row:
        return None
    if label is not None or not labelled:
        targets = () if label is None else (label,)
        return _Columns(line, len(values), name, targets, part, tuple(values), group=group)
    others = tuple(at for at in range(len(values)) if at not in (name, part, group))
    head = tuple(values)
    return _Columns(line, len(values), name, others, part, head, is_guess=True, group=group)


def _require_image(path: Path, line: int, values: Sequence[str], *, labelled: bool) -> None:
    """Refuse a first line that is neither a header nor an image and its class."""
    is_image = _is_image(values[0]) or os.path.exists(path.parent / values[0])  # noqa: PTH110
    if is_image and len(values) in ((2,) if labelled else (1, 2)):
        return
    expected, example = (
        "path and label, nor an image and its class",
        "path,label or path,label,split",
    )
    if not labelled:
        expected, example = "path, nor an image", "path"
    raise InputError(
        f"{path}, line {line} is no header that names {expected}: {' | '.join(values)[:80]!r}\n"
        f"Begin with a line such as {example}"
    )


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_SUFFIXES
