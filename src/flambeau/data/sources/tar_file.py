"""Labelled images in a tar file, by WebDataset's convention, or in a zip.

recipes/data/tar_shards.py reads the bytes of a tar, `zip_members` those of a zip.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from flambeau.data.sources.class_names_file import named_labels
from flambeau.data.sources.fingerprint import file_fingerprint
from flambeau.data.sources.folder import IMAGE_SUFFIXES
from flambeau.data.sources.index_cache import Arrays, joined, split_texts, stored_index
from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.listing import PARTS, numbers_or_words, split
from flambeau.data.sources.source import Source
from flambeau.data.sources.tar_masks import mask_in, masked_tar
from flambeau.data.sources.tar_targets import (
    has_targets,
    is_packed,
    json_targets,
    targets_text,
)
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import FOUND, TargetChoice, refuse_columns
from flambeau.data.sources.vector_targets import refuse_separator
from flambeau.data.sources.zip_members import ZipIndex, ZipReader, index_zip
from flambeau.errors import InputError, json_object, unreadable, why_no_json
from flambeau.recipes.data.tar_shards import ShardError, TarIndex, TarReader, index_tar

LABEL_FILES = ("cls", "json", "label", "class", "target")
"""Extensions of the files that hold a label, in the order in which they count."""

_JSON_KEYS = ("label", "class", "target", "category")
_LABEL_WORD = re.compile(
    r"(?:.*[._-])?(?:cls|lbls?|labels?|class(?:es)?|targets?|categor(?:y|ies)|annotations?)"
    r"(?:[._-]?(?:ids?|names?|index|idx|num|\d+))?(?:\..*)?",
    re.IGNORECASE,
)
# Only of files: as a key of a .json, y may be a coordinate.
_SHORT_LABEL_WORD = re.compile(r"(?:.*\.)?(?:gt|y)(?:\.(?:txt|json|npy|csv))?", re.IGNORECASE)
_IMAGES = {suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES}
_CONTROL = re.compile(r"[\x00-\x1f\ud800-\udfff]")  # and bytes of a name that are not UTF-8


class TarSource:
    """The samples of a tar or zip that hold an image; others count in `left_out`.

    The label is the first of these that the first image has, for all images: .cls, the number of a class;
    .json, whose `label`, `class`, `target` or `category` is a number or a name; .label, .class or .target, a
    number or a name; the image's folder, named like its class; .txt, a number or a name. If all are numbers,
    they are class numbers (see `named_labels`). A .json has several labels, or numbers (see `tar_targets`),
    if it says its task or there is no other label. Masks are a file beside the image (see `tar_masks`),
    without a file of a label. A file that looks like a label and contradicts folders or .txt is refused.
    Headers and labels are read once and kept beside the file.
    """

    def __init__(
        self,
        path: Path,
        *,
        labelled: bool = True,
        choice: TargetChoice = FOUND,
        is_zip: bool = False,
    ) -> None:
        self.task: TaskName = "classification"
        self.separator: str | None = None
        try:
            with_masks = labelled and choice.task in (None, "segmentation")
            kind = ("zip 1" if is_zip else "tar 4") + (
                " with masks" if with_masks else "" if labelled else " without labels"
            )
            kept = stored_index(
                path,
                lambda: _index(path, labelled=labelled, with_masks=with_masks, is_zip=is_zip),
                kind=kind,
            )
            self.by_mask = "by_mask" in kept
            self.masks = {name: kept[name] for name in kept if name.startswith("mask_")}
            self._files = split_texts(kept["names"])
            self._reader = _reader_of(path, _index_in(kept, self._files))
            self.image_sizes = kept["sizes"]
            endings = Counter(f".{name}" for name in split_texts(kept["left_out"]))
            self.left_out = (LeftOut(_printable(str(path)), endings),)
            self.by_folder = bool(kept["by_folder"])
            texts = split_texts(kept["labels"])
            if "by_json" in kept:
                found = json_targets(texts, path, choice, self.describe)
                self.task, self.classes, self.labels, self.separator = found
            else:
                labels = texts if self.by_folder else numbers_or_words(texts, self.describe)
                self.classes, self.labels = named_labels(
                    labels,
                    path,
                    self.describe,
                    labelled=labelled and not self.by_mask,
                    by_folder=self.by_folder,
                )
            if labelled and not self.by_mask:
                refuse_separator(path, choice, self.separator)
            facts = f"{self._files} {self.labels.tolist()} {self.classes}"
            self.fingerprint = file_fingerprint(path, facts)
        except ShardError as error:
            problem, _, remedy = str(error).rpartition("; ")
            raise InputError(f"{problem}\n{remedy[:1].upper()}{remedy[1:]}") from error
        except OSError as error:
            raise unreadable(path, error) from error

    @property
    def names(self) -> Sequence[str]:
        return self._reader.keys

    def __len__(self) -> int:
        return len(self._reader)

    def describe(self, index: int) -> str:
        return f"{self._reader.path}, {_printable(self._files[index])}"

    def read(self, index: int) -> bytes:
        try:
            return self._reader.read(index, self._reader.extensions(index)[0])
        except ShardError as error:
            raise OSError(str(error)) from error


def open_tar(
    path: Path, *, labelled: bool = True, choice: TargetChoice = FOUND, is_zip: bool = False
) -> tuple[Source, Source | None]:
    """The images of a tar or zip, or those to train and to validate on.

    The latter if all lie in train/ and one of val/, valid/, validation/, dev/, test/, with the class folders
    below if these are the labels.
    """
    if labelled:
        refuse_columns(path, replace(choice, separator=None, ignore_index=None))
    source = TarSource(path, labelled=labelled, choice=choice, is_zip=is_zip)
    opened: Source = source
    if labelled:
        if source.by_mask or (choice.task == "segmentation" and source.masks):
            index = _index_in(source.masks, split_texts(source.masks["mask_names"]), "mask_")
            opened = masked_tar(path, source, _reader_of(path, index), index, choice)
        else:
            refuse_columns(path, replace(choice, separator=None))
    parts = [_part(_folders(key)[: -1 if source.by_folder else None]) for key in source.names]
    return split(opened, parts if all(parts) else None)


def _part(folders: Sequence[str]) -> str:
    return next((PARTS[folder.lower()] for folder in folders if folder.lower() in PARTS), "")


def _index(path: Path, *, labelled: bool, with_masks: bool, is_zip: bool) -> Arrays:
    """The content of `stored_index`: names and places of the images, and their labels."""
    files = index_zip(path) if is_zip else index_tar(path)
    reader = _reader_of(path, files)
    samples, positions = _images(reader)
    masks = _masks(reader, samples) if with_masks else []
    if not samples:
        counts = Counter(name.rpartition(".")[2].lower() for name in files.names).most_common(3)
        listed = ", ".join(f"{count} .{extension}" for extension, count in counts)
        raise InputError(
            f"{path} holds no images{f' (found: {_printable(listed)})' if listed else ''}\n"
            f"Expected files that end in {' '.join(IMAGE_SUFFIXES)}"
        )
    # Masks of some images, in folders that may be classes, are not what the tar is about.
    in_folders = all(map(_folders, (reader.keys[sample] for sample in samples)))
    has_masks = len(masks) == len(samples) or (bool(masks) and not in_folders)
    kind = _kind(reader, samples[0], has_masks=has_masks) if labelled else "none"
    if kind in ("none", "mask"):
        labels = [""] * len(samples)
    elif kind == "folder":
        labels = _folder_labels(reader, samples)
    elif kind == "targets":
        labels = [_json_targets(reader, sample) for sample in samples]
    else:
        labels = [_label(reader, sample, kind) for sample in samples]
    if kind in ("folder", "txt"):
        _refuse_passed_over(reader, samples, labels, kind)
    different = len(set(labels))
    if kind == "txt" and different > len(labels) / 2 and not all(map(str.isdecimal, labels)):
        raise InputError(
            f"{path}: its .txt seem to be captions, {different} different ones for {len(labels)} images\n"
            "A classifier needs the number of a class: add it to each sample as .cls"
        )
    return {
        **_places(files, positions),
        "labels": joined(labels),
        "left_out": joined(
            [
                *_without_image(reader, samples),
                *_beside(reader, samples, positions, {"targets": "json"}.get(kind, kind)),
            ]
        ),
        "by_folder": np.array(kind == "folder"),
        **({"by_json": np.array(True)} if kind == "targets" else {}),
        **({"by_mask": np.array(True)} if kind == "mask" else {}),
        **(_places(files, masks, "mask_") if masks else {}),
    }


def _places(files: TarIndex | ZipIndex, positions: Sequence[int], start: str = "") -> Arrays:
    """The rows of an index that are meant, as arrays."""
    columns = files._asdict()
    names = columns.pop("names")
    return {f"{start}names": joined([names[position] for position in positions])} | {
        f"{start}{column}": np.array([values[position] for position in positions], np.int64)
        for column, values in columns.items()
    }


def _index_in(kept: Arrays, names: list[str], start: str = "") -> TarIndex | ZipIndex:
    """The inverse of `_places`."""
    kind = ZipIndex if f"{start}crcs" in kept else TarIndex
    columns = (kept[f"{start}{column}"].tolist() for column in kind._fields[1:])
    return kind(names, *columns)


def _reader_of(path: Path, index: TarIndex | ZipIndex) -> TarReader:
    return ZipReader(path, index) if isinstance(index, ZipIndex) else TarReader(path, index)


def _without_image(reader: TarReader, samples: Sequence[int]) -> list[str]:
    """The first extension of each sample that has no image."""
    others = sorted({*range(len(reader.keys))} - {*samples})
    return [_printable(reader.extensions(sample)[0].rpartition(".")[2]) for sample in others]


def _beside(
    reader: TarReader, samples: Sequence[int], positions: Sequence[int], kind: str
) -> Iterator[str]:
    """The extensions of the files beside images that are not read."""
    if kind == "none":
        return
    start = 0
    image = dict(zip(samples, positions, strict=True))
    for sample in range(len(reader.keys)):
        extensions = reader.extensions(sample)
        if sample in image:
            for number, extension in enumerate(extensions, start):
                is_read = extension == kind or (kind == "mask" and mask_in([extension]))
                if number != image[sample] and not is_read:
                    yield _printable(extension)
        start += len(extensions)


def _images(reader: TarReader) -> tuple[list[int], list[int]]:
    """Samples that have an image, and its position among all files of samples."""
    samples = []
    positions = []
    start = 0
    for sample, key in enumerate(reader.keys):
        extensions = reader.extensions(sample)
        images = [name for name in extensions if name in _IMAGES]
        images = images or [name for name in extensions if name.rpartition(".")[2] in _IMAGES]
        if len(images) > 1:
            raise InputError(
                f"{reader.path}: sample {_printable(key)} has {len(images)} images, .{images[0]} and "
                f".{images[1]}\nA name up to its first dot is a sample: have one image in each, and no dots "
                "but before the extension"
            )
        if images:
            samples.append(sample)
            positions.append(start + extensions.index(images[0]))
        start += len(extensions)
    return samples, positions


def _masks(reader: TarReader, samples: Sequence[int]) -> list[int]:
    """Positions among all files of samples of the masks of those that have one."""
    starts = itertools.accumulate(
        (len(reader.extensions(sample)) for sample in range(len(reader.keys))), initial=0
    )
    first = list(starts)
    found = []
    for sample in samples:
        extensions = reader.extensions(sample)
        mask = mask_in(extensions)
        if mask is not None:
            found.append(first[sample] + extensions.index(mask))
    return found


def _kind(reader: TarReader, sample: int, *, has_masks: bool) -> str:
    """Where labels are read from, decided by the first image."""
    extensions = reader.extensions(sample)
    if "cls" in extensions:
        return "cls"
    content = _json(reader, sample) if "json" in extensions else None
    if is_packed(content):
        return "targets"
    if content is not None and not has_targets(content) and _json_label(reader, sample) is not None:
        return "json"
    named = next((name for name in LABEL_FILES if name in extensions and name != "json"), None)
    if named is not None:
        return named
    if has_masks and mask_in(extensions) is not None:
        return "mask"
    if _folders(reader.keys[sample]):
        return "folder"
    if "txt" in extensions:
        return "txt"
    if has_targets(content):
        return "targets"
    raise InputError(
        f"{_where(reader, sample)} has no label (found: .{', .'.join(extensions)})\n"
        "Expected the number of its class in a .cls, its number or name in a .label, .class or .target, "
        "`label` in a .json, or one folder per class: cat/1.jpg"
    )


def _label(reader: TarReader, sample: int, kind: str) -> str:
    where = f"{_where(reader, sample)}.{kind}"
    if kind not in reader.extensions(sample):
        raise InputError(
            f"{where} is missing, but other images have a .{kind}\nAdd it to the sample"
        )
    label = (
        _json_label(reader, sample) if kind == "json" else _text(reader.read(sample, kind), where)
    )
    if label is None:
        raise InputError(f"{where} has no `label`, as others have\nAdd it to the sample")
    if not label or _CONTROL.search(label) or (kind == "cls" and not re.fullmatch(r"-?\d+", label)):
        expected = "" if kind == "cls" else ", or its name in one line"
        raise InputError(
            f"{where}: '{_printable(label[:80])}' is no label\nExpected the number of a class{expected}"
        )
    return label


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text: {error}\nMake it again") from error


def json_label(values: object) -> object:
    """What the content of a sample's .json gives as its label; None if it gives none."""
    if not isinstance(values, dict):
        return values if type(values) is int else None
    return next((values[key] for key in _JSON_KEYS if values.get(key) is not None), None)


def _json(reader: TarReader, sample: int) -> object:
    try:
        return json.loads(reader.read(sample, "json"), object_pairs_hook=json_object)
    except (ValueError, RecursionError) as error:
        where = f"{_where(reader, sample)}.json"
        raise InputError(f"{where} cannot be read: {why_no_json(error)}\nMake it again") from error


def _json_label(reader: TarReader, sample: int) -> str | None:
    where = f"{_where(reader, sample)}.json"
    values = _json(reader, sample)
    label = json_label(values)
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    if isinstance(label, bool | float | list | dict):
        raise InputError(
            f"{where}: {label!r:.80} is no label\nExpected one number or name of a class"
        )
    return None if label is None else str(label).strip()


def _json_targets(reader: TarReader, sample: int) -> str:
    where = f"{_where(reader, sample)}.json"
    if "json" not in reader.extensions(sample):
        raise InputError(f"{where} is missing, but other images have a .json\nAdd it to the sample")
    return targets_text(_json(reader, sample), where)


def _refuse_passed_over(
    reader: TarReader, samples: Sequence[int], labels: Sequence[str], kind: str
) -> None:
    """InputError if files that look like labels say something else than the labels that are read."""
    found: dict[str, list[tuple[int, str, object]]] = {}
    for sample, label in zip(samples, labels, strict=True):
        for what, value in _label_like(reader, sample):
            if what != f".{kind}":
                found.setdefault(what, []).append((sample, label, value))
    for what, rows in found.items():
        values = {value for _, _, value in rows}
        if what == ".txt" and not 1 < len(values) <= len(rows) / 2:  # captions, or all alike
            continue
        pairs = {(label, value) for _, label, value in rows}
        if len(pairs) > len({label for label, _ in pairs}) or len(pairs) > len(values):
            instead = "the folders" if kind == "folder" else "the .txt"
            raise InputError(
                f"{_where(reader, rows[0][0])}: {_printable(what)} looks like its label and is not read; "
                f"{instead} would be the classes, and say something else\n"
                "Call it .cls (a number) or .label (a number or a name), or leave it out of the tar"
            )


def _label_like(reader: TarReader, sample: int) -> Iterator[tuple[str, object]]:
    """What of a sample looks like a label, with its value."""
    for extension in reader.extensions(sample):
        if extension == "json":
            values = _json(reader, sample)
            for key, value in values.items() if isinstance(values, dict) else ():
                if _LABEL_WORD.fullmatch(key) and value is not None:
                    yield f"{key!r} in .json", json.dumps(value)
            if isinstance(values, int | str):
                yield ".json", values
        elif (
            extension == "txt"
            or _LABEL_WORD.fullmatch(extension)
            or _SHORT_LABEL_WORD.fullmatch(extension)
        ):
            yield f".{extension}", reader.read(sample, extension).strip()


def _folder_labels(reader: TarReader, samples: Sequence[int]) -> list[str]:
    """The folder of each image.

    With cat/2021/1.jpg and dog/2021/1.jpg either cat or 2021 could be the class, which is an error.
    """
    labels: list[str] = []
    above: dict[str, list[str]] = {}
    for sample in samples:
        folders = _folders(reader.keys[sample])
        if not folders or _CONTROL.search(folders[-1]):
            raise InputError(
                f"{_where(reader, sample)} lies in no folder whose name could be a class\n"
                "Expected one folder per class, as other images have it: cat/1.jpg"
            )
        labels.append(folders[-1])
        before = [folder for folder in folders[:-1] if folder.lower() not in PARTS]
        if above.setdefault(folders[-1], before) != before:
            raise InputError(
                f"{_where(reader, sample)}: a folder {folders[-1]} lies in "
                f"{_printable('/'.join(before)) or '.'} and in "
                f"{_printable('/'.join(above[folders[-1]])) or '.'}, so either may be the class\n"
                "Put the images right into the folder of their class, or add a .cls to each sample"
            )
    return labels


def _folders(key: str) -> list[str]:
    return [folder for folder in key.split("/")[:-1] if folder not in ("", ".")]


def _where(reader: TarReader, sample: int) -> str:
    return f"{reader.path}, {_printable(reader.keys[sample])}"


def _printable(name: str) -> str:
    """A name on one line, even if its bytes are not UTF-8."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], name)
