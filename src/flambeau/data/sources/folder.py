"""Labelled images in a folder with one sub-folder per class."""

import functools
import hashlib
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch

from flambeau.data.sources.class_names_file import refuse_pairs
from flambeau.data.sources.escaped_names import named_class, require_different
from flambeau.data.sources.fingerprint import sampled_content, size_of
from flambeau.data.sources.left_out import LeftOut
from flambeau.errors import InputError, unreadable
from flambeau.images.file_formats import ENDINGS, format_of
from flambeau.regular_file import read_file

_FLAGS = getattr(os, "O_BINARY", 0)  # Windows only

IMAGE_SUFFIXES = tuple(sorted(ending for endings in ENDINGS.values() for ending in endings))

# Names that say nothing, or another format than many of such files are of: their first bytes decide.
_UNSURE_SUFFIXES = ("", ".heic", ".heif", ".image", ".img", ".jfi", ".jif", ".jp2", ".jxl")
_TABLE_SUFFIXES = (".csv", ".tsv", ".lst")
_LABEL_SUFFIXES = (
    *_TABLE_SUFFIXES,
    ".json",
    ".jsonl",
    ".mat",
    ".parquet",
    ".xls",
    ".xlsx",
    ".xml",
    ".yaml",
    ".yml",
)
_AMBIGUOUS = ("", "BMP", "PPM")  # begin with two letters, as a text may


class FolderSource:
    """Images in a folder with one sub-folder per class.

    Classes are the sub-folders by name, as `folder_names` decodes them. Images are found at any depth by
    IMAGE_SUFFIXES in any case, or by their first bytes for _UNSURE_SUFFIXES, in the order of their names;
    links are followed. Hidden files and folders and __MACOSX are skipped, other files counted.
    """

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise InputError(f"{root} is not a folder")
        self.folder = root.absolute()
        named = named_class(root)
        folders = sorted((named(name), name) for name in map(_class_name, class_folders(root)))
        self.classes: tuple[str, ...] = tuple(name for name, _ in folders)
        require_different(self.classes, root)
        refuse_pairs(self.classes, root)
        others = LeftOut(_printable(root))
        beside = [entry for entry in _entries(root) if not _is_folder(entry)]
        for entry in beside:
            if may_hold_labels(entry.name):
                others.add(_suffix(entry), Path(entry.path))
        loose = sorted(entry.name for entry in beside if _is_image(entry))
        if loose:
            tables = sorted(entry.name for entry in beside if _suffix(entry) in _TABLE_SUFFIXES)
            listed = f", or name the table of their labels: {root}/{tables[0]}" if tables else ""
            raise InputError(
                f"{root} holds images outside any class folder ({len(loose)}, such as {loose[0]})\n"
                f"Move each into the folder of its class: {root}/CLASS/{loose[0]}{listed}"
            )
        if not self.classes:
            raise InputError(
                f"{root} has no sub-folders; expected one per class: {root}/CLASS/1.jpg"
            )
        names: list[str] = []
        labels: list[int] = []
        for label, (_, name) in enumerate(folders):
            names += sorted(_images(self.folder / name, f"{name}/", (), others))
            labels += [label] * (len(names) - len(labels))
        if not names:
            listed = f" (found: {others.endings})" if others.counts else ""
            count = len(self.classes)
            where = (
                "1 sub-folder, but no image in it"
                if count == 1
                else f"{count} sub-folders, but no image in them"
            )
            raise InputError(
                f"{root} has {where}{listed}\nExpected files that end in {' '.join(IMAGE_SUFFIXES)}"
            )
        self.names: tuple[str, ...] = tuple(names)
        self.labels = torch.tensor(labels)
        self.left_out = (others,)

    def __len__(self) -> int:
        return len(self.names)

    def describe(self, index: int) -> str:
        return _printable(self.file_at(index))

    def file_at(self, index: int) -> Path:
        return self.folder / self.names[index]

    def read(self, index: int) -> bytes:
        # 16 us where pathlib takes 25, for 110 KB in the page cache.
        file = os.open(f"{self.folder}/{self.names[index]}", os.O_RDONLY | _FLAGS)
        try:
            size = os.fstat(file).st_size
            data = os.read(file, size + 1)
            if len(data) == size:
                return data
            parts = [data]  # it has grown, is larger than 2 GiB, or reports no size
            while part := os.read(file, 1 << 20):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(file)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in self.names:
            digest.update(os.fsencode(f"{name}\0{size_of(self.folder / name)}\n"))
        return digest.hexdigest()

    @cached_property
    def content_sample(self) -> str:
        return sampled_content(len(self), self.file_at)


class FileSet:
    """Images in listed files: N paths relative to `root`, and N labels, positions in `classes`."""

    def __init__(
        self, root: Path, names: Sequence[str], labels: Sequence[int], classes: Sequence[str]
    ) -> None:
        self._root = root
        self.names = tuple(names)
        self.classes = tuple(classes)
        self.labels = torch.tensor(labels, dtype=torch.int64)

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self.labels.tolist()} {self.classes}".encode())
        for name in self.names:
            digest.update(os.fsencode(f"{name}\0{size_of(self._root / name)}\n"))
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.names)

    def describe(self, index: int) -> str:
        return str(self.file_at(index))

    def file_at(self, index: int) -> Path:
        return self._root / self.names[index]

    def read(self, index: int) -> bytes:
        return read_file(self.file_at(index))


def may_hold_labels(name: str) -> bool:
    """Whether a file beside images may say their classes, by its name."""
    is_table = os.path.splitext(name)[1].lower() in _LABEL_SUFFIXES  # noqa: PTH122
    return is_table or "label" in name.lower() or "class" in name.lower()


def class_folders(root: Path) -> list[Path]:
    """The sub-folders that would be classes, unsorted; InputError if they cannot be listed."""
    return [Path(entry.path) for entry in _entries(root) if _is_folder(entry)]


def images_below(root: Path) -> tuple[list[str], LeftOut]:
    """All images of a folder, by the rules of `FolderSource`, and the other files.

    Relative paths, with slashes, sorted: the folder's own, then sub-folder by sub-folder.
    """
    others = LeftOut(_printable(root))
    names: list[str] = []
    for entry in _entries(root):
        if _is_image(entry):
            names.append(entry.name)
        elif not _is_folder(entry):
            others.add(_suffix(entry), Path(entry.path))
    names.sort()
    for folder in sorted(class_folders(root)):
        names += sorted(_images(folder, f"{folder.name}/", (), others))
    return names, others


def classes_above(root: Path, names: Sequence[str]) -> list[list[str]]:
    """For each image the classes that its folders stand for, from the outermost to the innermost."""
    named = functools.cache(lambda folder: named_class(root / folder))

    @functools.cache
    def classes(folder: str) -> list[str]:
        parent, _, name = folder.rpartition("/")
        return [*classes(parent), named(parent)(name)] if folder else []

    return [classes(name.rpartition("/")[0]) for name in names]


def _images(folder: Path, prefix: str, above: tuple[Path, ...], others: LeftOut) -> Iterator[str]:
    """Names in a class folder, unsorted; files of other types are counted in `others`."""
    here = folder.resolve()
    if here in above:
        raise InputError(f"{_printable(folder)} is a link back to {_printable(here)}: remove it")
    for entry in _entries(folder):
        if _is_folder(entry):
            below = f"{prefix}{entry.name}/"
            yield from _images(Path(entry.path), below, (*above, here), others)
        elif _is_image(entry):
            yield prefix + entry.name
        else:
            others.add(_suffix(entry), Path(entry.path))


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            # Archives made on a Mac contain a folder __MACOSX with shadows of the files.
            return [e for e in entries if e.name[0] != "." and e.name != "__MACOSX"]
    except OSError as error:
        raise unreadable(_printable(folder), error) from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:  # a link to itself, or into a folder without permission
        raise unreadable(_printable(Path(entry.path)), error) from error


def _is_image(entry: os.DirEntry[str]) -> bool:
    suffix = _suffix(entry)
    if suffix not in IMAGE_SUFFIXES:
        return suffix in _UNSURE_SUFFIXES and _begins_as_image(entry)
    if _is_folder(entry):
        return False
    # A broken link is an image that cannot be read; reading a pipe would never end.
    return entry.is_symlink() or entry.is_file(follow_symlinks=False)


def _begins_as_image(entry: os.DirEntry[str]) -> bool:
    try:
        if not entry.is_file():
            return False
        with open(entry.path, "rb") as file:  # noqa: PTH123 - a Path each would be slow
            return format_of(file.read(16)) not in _AMBIGUOUS
    except OSError:  # it is counted among the files that are left out
        return False


def _suffix(entry: os.DirEntry[str]) -> str:
    return os.path.splitext(entry.name)[1].lower()  # noqa: PTH122 - a Path each would be slow


def _class_name(folder: Path) -> str:
    try:
        folder.name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"folder {_printable(folder)}: a class name must be UTF-8") from error
    return folder.name


def _printable(path: Path) -> str:
    """A path as text, even if its bytes are not UTF-8."""
    return str(path).encode(errors="backslashreplace").decode()
