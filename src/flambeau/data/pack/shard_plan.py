"""Which images `flambeau pack` writes into which file, under which name; and the lists of im2rec.

Source: MXNet 1.9.1 `tools/im2rec.py`: how it shuffles, and what chunks and ratios mean.
"""

import os
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from flambeau.data.pack.label_vectors import VectorRecords, has_vectors
from flambeau.data.pack.single_objects import open_single_objects
from flambeau.data.sources.data_names import data_text
from flambeau.data.sources.escaped_names import folder_names
from flambeau.data.sources.folder import FolderSource
from flambeau.data.sources.masks.mask_file import IGNORED
from flambeau.data.sources.open_data import open_parts
from flambeau.data.sources.open_store import SingleObjects
from flambeau.data.sources.packed_formats import FORMATS, KIND_OF_ENDING, endings_of
from flambeau.data.sources.packed_targets import TargetHead
from flambeau.data.sources.source import Source, left_out_lines, mask_values, pixel_kind
from flambeau.data.sources.targets import (
    FOUND,
    TargetChoice,
    kind_of_targets,
    separator_of,
    task_of,
)
from flambeau.errors import InputError

IM2REC_SEED = 100
PACKED = endings_of("files", "both", "pixels")
WITH_VECTORS = {
    "rec": ".rec",
    "tfrecord": ".tfrecord",
    "tar": ".tar",
    "zip": ".zip",
    "parquet": ".parquet",
    "arrow": ".arrow",
}
"""Formats for several labels per image, and numbers, with their endings."""
WITH_MASKS = ("tar", "zip", "parquet", "arrow")
FOLDER_UNIT = 2000  # images of a folder that are redone after a kill, at most

# Characters that some file system refuses.
_UNSAFE = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|\ud800-\udfff]')
_MAX_NAME = 200  # bytes of a part of a path; file systems end at 255, and endings are added


@dataclass(frozen=True)
class Split:
    """How images go to files.

    Attributes:
        shards: files per part, NAME-00000-of-0000N.EXT.
        chunks: equal parts NAME_0.EXT and so on, made first.
        train_ratio: share of each chunk for NAME_train.EXT; 1 makes no parts.
        test_ratio: share for NAME_test.EXT; the rest is NAME_val.EXT.
    """

    shards: int = 1
    chunks: int = 1
    train_ratio: float = 1.0
    test_ratio: float = 0.0
    shuffle: bool = False
    seed: int = IM2REC_SEED

    def check(self) -> None:
        """InputError for values out of range."""
        for name in ("shards", "chunks"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if not 0 < self.train_ratio <= 1:
            raise InputError(
                f"--train-ratio must be above 0 and at most 1, got {self.train_ratio:g}"
            )
        if self.test_ratio and self.train_ratio == 1:
            raise InputError("--test-ratio needs --train-ratio, which says how much is left to it")
        if not 0 <= self.test_ratio <= 1 - self.train_ratio + 1e-9:
            raise InputError(
                f"--test-ratio must be from 0 to what --train-ratio leaves, got {self.test_ratio:g}"
            )


class Unit(NamedTuple):
    """Images written, and redone after a kill, as a whole; `file` lies beside DST, or in it."""

    file: str
    part: int
    indices: Sequence[int]


def target_kind(dst: Path) -> str:
    """The format for the ending of DST; InputError if nothing can be packed into it."""
    kind = KIND_OF_ENDING.get(dst.suffix.lower()) if dst.suffix else "folder"
    if kind is None or FORMATS[kind].holds == "paths":
        raise InputError(
            f"{data_text(dst)}: nothing can be packed into {dst.suffix.lower()}\n"
            f"Expected a name that ends in {PACKED}, or in nothing: a folder"
        )
    return kind


def head_of(source: Source) -> TargetHead:
    """What all targets of a source have in common."""
    return TargetHead(task_of(source), tuple(source.classes), separator_of(source))


def named_parts(
    src: Path, kind: str, *, download: bool = False, choice: TargetChoice = FOUND
) -> list[tuple[str, Source]]:
    """All images that `flambeau train` would read, under '', or under 'train' and 'val'; or those of a .rec
    with label vectors.

    `kind`: the format to make, as from `target_kind`, or 'list'.
    """
    try:
        train, val = _opened(src, download=download, choice=choice)
    except InputError as error:
        if choice != FOUND or not has_vectors(src):
            raise
        if kind != "rec":
            problem = str(error).splitlines()[0]
            raise InputError(
                f"{problem}, which only a .rec file can hold\n"
                "Name a DST that ends in .rec; flambeau predict reads the images without labels"
            ) from error
        train = VectorRecords(src)
        val = None
    what = {"list": "a .lst", "folder": "a folder"}.get(kind, f"{kind} here")
    if mask_values(train) and kind not in WITH_MASKS:
        raise InputError(
            f"{src} has masks, and {what} keeps none\n"
            f"Name a DST that ends in one of {' '.join(WITH_VECTORS[kind] for kind in WITH_MASKS)}"
        )
    if kind_of_targets(train).is_table and kind not in WITH_VECTORS:
        raise InputError(
            f"{src} has targets for {task_of(train)}, and {what} holds one class per image\n"
            f"Name a DST that ends in one of {' '.join(WITH_VECTORS.values())}"
        )
    if kind != "list" and pixel_kind(train) != "uint8":
        raise InputError(
            f"{train.describe(0)} has floating-point pixels, which no file here would keep\n"
            "Return 8-bit ones to pack them: (x * 255).round().clip(0, 255) as uint8 of pixels in 0 .. 1"
        )
    return [("", train)] if val is None else [("train", train), ("val", val)]


def _opened(src: Path, *, download: bool, choice: TargetChoice) -> tuple[Source, Source | None]:
    try:
        return open_parts(src, download=download, choice=choice)
    except SingleObjects:
        return open_single_objects(src, choice)


def written_classes(source: Source) -> tuple[str, ...]:
    """The lines of the file of class names, of masks with their numbers."""
    names = tuple(source.classes)
    if not mask_values(source):
        return names
    return tuple(
        f"{value} {name}" for value, name in zip(written_values(source), names, strict=True)
    )


def written_values(source: Source) -> tuple[int, ...]:
    """Each class's number in packed masks: its own, if 255 is free for what is ignored."""
    values = mask_values(source)
    return values if IGNORED not in values else tuple(range(len(values)))


def remarks_on_parts(parts: Sequence[tuple[str, Source]], kind: str) -> list[str]:
    """Possible surprises: files left out; classes empty, or with other numbers in a folder."""
    first = parts[0][1]
    if isinstance(first, VectorRecords):
        return [
            "labels are vectors, and stay as they are; boxes in pixels would not fit after --resize"
        ]
    classes = first.classes
    used = {
        name
        for _, source in parts
        for at, name in enumerate(classes)
        if kind_of_targets(source).has(source.labels, at).any()
    }
    empty = [name for name in classes if name not in used]
    remarks = left_out_lines(*(source for _, source in parts))
    if empty:
        shown = ", ".join(empty[:5]) + ", ..." * (len(empty) > 5)
        what = {"multilabel": "labels", "regression": "columns"}.get(task_of(first), "classes")
        kept = (
            "have empty folders, which training refuses"
            if kind == "folder"
            else "keep their numbers"
        )
        remarks.append(
            f"{len(empty)} of {len(classes)} {what} are without any image: {shown}; they {kept}"
        )
    by_name = sorted(classes)
    if kind == "folder" and by_name != list(classes):
        name = next(name for name, other in zip(classes, by_name, strict=True) if name != other)
        remarks.append(
            f"classes of a folder are numbered by their names: {name!r} becomes {by_name.index(name)}, "
            f"and was {classes.index(name)}"
        )
    return remarks


def units_of(parts: Sequence[tuple[str, Source]], dst: Path, split: Split) -> list[Unit]:
    """Which images go into which file."""
    if len(parts) > 1 and (split.chunks > 1 or split.train_ratio < 1):
        flag = "--chunks" if split.chunks > 1 else "--train-ratio"
        raise InputError(
            f"the images are in two parts already, {parts[0][0]} and {parts[1][0]}; leave {flag} out\n"
            "or pack one of the parts alone"
        )
    is_folder = target_kind(dst) == "folder"
    if is_folder and (split.shards > 1 or split.chunks > 1):
        flag = "--shards" if split.shards > 1 else "--chunks"
        raise InputError(f"{flag} is for packed files, and {dst} would be a folder of images")
    units = []
    for number, (name, source) in enumerate(parts):
        for chunk, ratio, indices in deal(len(source), split):
            part = name or ratio
            if len(indices) < split.shards:
                raise InputError(
                    f"{dst}: {len(indices)} images {f'for {part} ' * bool(part)}are too few for "
                    f"{split.shards} files\nAsk for fewer files, or give more images"
                )
            if is_folder:
                count = -(-len(indices) // FOLDER_UNIT)
                units += [Unit(part, number, lot) for lot in _lots(indices, count)]
                continue
            stem = dst.stem + chunk + f"_{part}" * bool(part)
            for shard, lot in enumerate(_lots(indices, split.shards)):
                which = f"-{shard:05}-of-{split.shards:05}" if split.shards > 1 else ""
                units.append(Unit(f"{stem}{which}{dst.suffix}", number, lot))
    return units


def deal(length: int, split: Split) -> Iterator[tuple[str, str, list[int]]]:
    """The images of each file of im2rec: '', '_0', '_1' of the chunk; '', 'train', 'val', 'test'; where."""
    order = list(range(length))
    if split.shuffle:
        random.Random(split.seed).shuffle(order)
    size = -(-length // split.chunks)
    train, test = int(size * split.train_ratio), int(size * split.test_ratio)
    for chunk in range(split.chunks):
        lot = order[chunk * size : (chunk + 1) * size]
        suffix = f"_{chunk}" * (split.chunks > 1)
        if split.train_ratio == 1:
            yield suffix, "", lot
            continue
        yield suffix, "train", lot[test : test + train]
        if split.train_ratio + split.test_ratio < 1 - 1e-9:
            yield suffix, "val", lot[test + train :]
        if split.test_ratio:
            yield suffix, "test", lot[:test]


def _lots(indices: Sequence[int], count: int) -> Iterator[Sequence[int]]:
    for lot in range(count):
        yield indices[lot * len(indices) // count : (lot + 1) * len(indices) // count]


def record_paths(source: Source, *, dots: bool) -> list[str]:
    """CLASS/NAME without an ending for each image: unique, and a safe path on every system.

    Without `dots` the last part has none: in a tar the sample's key ends there. CLASS/NAME.jpg of a folder
    keeps its name; a class that cannot be a folder name is escaped.
    """
    is_table = kind_of_targets(source).is_table  # then no folder says what an image is
    folders_of = [""] if is_table else folder_names(source.classes)
    labels = [0] * len(source) if is_table else source.labels.tolist()
    paths = []
    taken = set()
    for name, label in zip(source.names, labels, strict=True):
        stem = re.sub(r"\.\w{1,5}$", "", name)
        home = folders_of[label]
        homes = () if is_table else (home, source.classes[label])
        prefix = next((f"{one}/" for one in homes if stem.startswith(f"{one}/")), "")
        below = stem.removeprefix(prefix)
        *folders, last = (_safe(part) for part in below.split("/"))
        last = last if dots else last.replace(".", "_")
        path = "/".join([*filter(None, [home]), *folders, last])
        unique = path
        count = 2
        while unique.lower() in taken:
            unique, count = f"{path}-{count}", count + 1
        taken.add(unique.lower())
        paths.append(unique)
    return paths


def _safe(part: str) -> str:
    """A part of a path as a file name that every system allows and does not hide."""
    part = _UNSAFE.sub("_", part).encode()[:_MAX_NAME].decode(errors="ignore").strip(" ")
    return "_" + part.lstrip(".") if part.startswith(".") or not part else part


def list_files(parts: Sequence[tuple[str, Source]], dst: Path, split: Split) -> dict[Path, str]:
    """The .lst files of `im2rec --list` with their text; image paths are relative to the list."""
    split.check()
    if split.shards > 1:
        raise InputError("--shards is for packed files; --chunks makes several lists")
    prefix = dst.with_suffix("") if dst.suffix == ".lst" else dst
    texts = {}
    for name, source in parts:
        if not isinstance(source, FolderSource):
            raise InputError(
                "--list is for a folder of images; these are not files of their own\n"
                "Leave --list out to pack them as they are"
            )
        if any(re.search(r"[\t\r\n]", image) for image in source.names):
            raise InputError(
                f"{source.folder} has a file with a tab or line break in its name\nRename it"
            )
        folder = os.path.relpath(source.folder, prefix.absolute().parent)
        labels = source.labels.tolist()
        for chunk, ratio, indices in deal(len(source), split):
            part = name or ratio
            path = prefix.with_name(prefix.name + chunk + f"_{part}" * bool(part) + ".lst")
            texts[path] = "".join(
                f"{at}\t{labels[at]:f}\t{os.path.normpath(f'{folder}/{source.names[at]}')}\n"
                for at in indices
            )
    return texts
