"""`flambeau verify FILE`: each checksum, record and image header of packed images; salvage of good ones."""

import contextlib
import itertools
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flambeau.data.pack.encode_images import Layout, no_color
from flambeau.data.pack.output_files import (
    MANIFEST,
    name_disk_errors,
    read_manifest,
    remove_or_say,
    sync_below,
)
from flambeau.data.pack.pack import map_in_order, record_crc
from flambeau.data.pack.salvage_records import ScannedRecord, index_keys
from flambeau.data.pack.scan import in_one_line, scan
from flambeau.data.pack.shard_plan import PACKED, target_kind
from flambeau.data.pack.table_files import save_rows
from flambeau.data.pack.writers import TABLES, Record, ZipWriter, open_writer
from flambeau.data.sources.arrays.hdf5_file import check_chunks as check_hdf5_chunks
from flambeau.data.sources.arrays.tensorstore_file import check_chunks as check_store_chunks
from flambeau.data.sources.class_names_file import classes_file, known_classes, named_labels
from flambeau.data.sources.data_names import refuse_address
from flambeau.data.sources.escaped_names import CLASS_NAMES
from flambeau.data.sources.masks.mask_file import decoded_mask, require_same_size
from flambeau.data.sources.open_data import only_folder
from flambeau.data.sources.packed_formats import FORMATS
from flambeau.data.sources.packed_targets import mask_text, vector_text
from flambeau.data.sources.path_format import kind_of, open_path, shards_in, shards_of
from flambeau.data.sources.tables.hugging_face import saved_files
from flambeau.errors import (
    ZIP_ERRORS,
    DamagedData,
    DecodeError,
    InputError,
    UnsupportedImage,
    require_folder,
    unreadable,
)
from flambeau.images.all_channels import all_channels
from flambeau.images.decode import Picture, Stored, decode, size_of
from flambeau.images.stand_ins import stand_in_at
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk
from flambeau.recipes.data.recordio import RecordWriter
from flambeau.recipes.data.tar_shards import TarWriter
from flambeau.recipes.data.tfrecord import TFRecordWriter

_MAX_CLASSES = 1 << 24  # as in class_names.named_labels


class Damage(NamedTuple):
    """Which record is damaged, at which byte, and how."""

    record: str
    offset: int | None
    what: str


@dataclass
class FileReport:
    """The result for one file.

    Attributes:
        checksums: a DST.pack.json, or an index, has one per image.
        not_read: undamaged records, but unsupported or of another kind.
    """

    path: Path | str
    kind: str
    good: int = 0
    checksums: bool = False
    format_checksums: bool = True
    absent: Sequence[str] = ()
    saved: bool = False
    damaged: list[Damage] = field(default_factory=list)
    not_read: list[Damage] = field(default_factory=list)


def packed_files(path: Path) -> list[tuple[Path, str]]:
    """The packed files that a path stands for, with their formats."""
    refuse_address(path)
    kind = kind_of(path)
    if kind == "listing":
        raise InputError(f"{path} is a list\nPack it, and verify what comes of it")
    if kind == "arrow" and path.is_dir():
        return [(file, kind) for file in saved_files(path)]
    if kind is not None:
        return [(path, kind)]
    if shards := shards_of(path):
        return [(shard, str(kind_of(shard))) for shard in shards]
    if not path.is_dir():
        other = stand_in_at(path)
        if other is not None:
            raise InputError(f"{path} is {other}")
        what = "is no packed file" if path.exists() else "does not exist"
        raise InputError(f"{path} {what}\nExpected the folder of a run, or {PACKED}")
    inside = [(shard, str(kind_of(shard))) for shard in shards_in(only_folder(path))]
    return inside or [(path, "folder")]


def verify_file(
    path: Path,
    kind: str,
    *,
    deep: bool = False,
    workers: int = 1,
    say: Callable[[Damage], None] = lambda _: None,
    salvage: Path | None = None,
) -> FileReport:
    report = FileReport(path, kind)
    try:
        checksums = _Checksums.beside(path)
        report.checksums = checksums is not None

        damages: list[tuple[Damage, bool | None]] = []

        def good() -> Iterator[ScannedRecord]:
            for record in _checked(path, kind, checksums, deep, workers):
                if record.damage is None:
                    report.good += 1
                    yield record
                else:
                    damage = Damage(record.name, record.offset, record.damage)
                    damages.append((damage, record.whole))
                    say(damage)

        if salvage is None:
            for _ in good():
                pass
        else:
            report.saved = _save(good(), path, kind, salvage)
        judge(report, damages)
        if not damages:
            report.format_checksums, report.absent = _check_storage(path, kind)
    except OSError as error:
        if error.filename is None or Path(error.filename) != path:
            raise
        raise unreadable(path, error) from error
    return report


def judge(report: FileReport, damages: Sequence[tuple[Damage, bool | None]]) -> None:
    """Undecided damage counts if the file has good records; else it is of another kind."""
    either = not report.good and not any(whole is False for _, whole in damages)
    for damage, whole in damages:
        is_whole = either if whole is None else whole
        (report.not_read if is_whole else report.damaged).append(damage)


class _Checksums:
    """The CRC-32 of class and bytes of each image, as `flambeau pack` recorded them."""

    def __init__(self, classes: list[str], entry: dict[str, Any]) -> None:
        self.classes = classes
        text = entry["crc32"]
        self._left = Counter(int(text[k : k + 8], 16) for k in range(0, len(text), 8))

    @classmethod
    def beside(cls, path: Path) -> "_Checksums | None":
        """The checksums of a file, from the DST.pack.json that lists it; None if there is none."""
        for manifest in sorted(path.absolute().parent.glob(f"*{MANIFEST}")):
            facts = read_manifest(manifest)
            if path.absolute().name in facts["files"]:
                return cls(facts["classes"], facts["files"][path.absolute().name])
        return None

    def match(
        self, label: int | str | Tensor | tuple[str, ...] | bytes | None, image: Stored
    ) -> bool:
        """Whether an image with this target was packed, and has not been matched before."""
        name = mask_text(label) if isinstance(label, bytes) else label
        if isinstance(label, int):
            name = self.classes[label] if label < len(self.classes) else None
        elif isinstance(label, tuple):
            name = vector_text(torch.tensor([float(one in label) for one in self.classes]))
        elif isinstance(label, Tensor):
            # Of vectors that are no targets, such as boxes, only the images are compared.
            name = vector_text(label) if self.classes else None
        crc = record_crc(str(name), image)
        if not self._left[crc]:
            return False
        self._left[crc] -= 1
        return True

    def missing(self) -> int:
        """The number of packed images that have not been matched."""
        return sum(self._left.values())


def _checked(
    path: Path, kind: str, checksums: _Checksums | None, deep: bool, workers: int
) -> Iterator[ScannedRecord]:
    """The records of a file, with damage that their bytes alone do not show."""
    if FORMATS[kind].is_zip and checksums is None and (member := _bad_member(path)) is not None:
        unknown = f"without {path.name}{MANIFEST} it is not known of which image, so none is good"
        yield ScannedRecord(member, None, damage=f"its checksum does not match; {unknown}")
        return
    damaged = 0
    closed = False
    may_be_boxes = False
    is_numbered = False
    num_classes = _num_classes(path)
    with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
        check = partial(check_image, deep=deep)
        for record in map_in_order(pool, check, scan(path, kind), ahead=4 * workers):
            damage = record.damage or (record.doubt if checksums is None else None)
            if damage is None and isinstance(record.label, int) and record.label >= num_classes:
                damage = f"class {record.label}, of {num_classes} classes"
            if damage is None and checksums is not None:
                assert record.image is not None
                if not checksums.match(record.label, record.image):
                    damage = "its bytes or its class are not what was packed"
            damaged += damage is not None
            may_be_boxes |= kind == "rec" and isinstance(record.label, Tensor)
            # Of a TFRecord the name is compared, and training reads the number beside it.
            is_numbered |= isinstance(record.label, str if kind == "tfrecord" else int)
            closed |= record.damage is not None and record.name == "the file"
            # With recorded checksums, undecided damage is damage: the record was good when it was packed.
            whole = False if checksums is not None and record.whole is None else record.whole
            yield record._replace(damage=damage, whole=whole)
    if FORMATS[kind].is_zip and not damaged and (member := _bad_member(path)) is not None:
        yield ScannedRecord(member, None, damage="its checksum does not match")
    # Opening a Parquet file would copy it; its rows have been checked one by one.
    if FORMATS[kind].is_walked and kind != "parquet" and not damaged:
        try:
            _open_as_training(path, may_be_boxes=may_be_boxes)
        except InputError as error:
            reason = in_one_line(error, path)
            whole = not isinstance(error, DamagedData)
            yield ScannedRecord(
                "the file", None, damage=f"training refuses it: {reason}", whole=whole
            )
    if checksums is not None and is_numbered and (wrong := _wrong_classes(path, checksums.classes)):
        yield ScannedRecord("the file", None, damage=wrong)
    missing = 0 if checksums is None or closed else checksums.missing() - damaged
    if missing > 0:
        what = "an image that was packed is" if missing == 1 else f"{missing} packed images are"
        yield ScannedRecord("the file", None, damage=f"{what} missing")


def _open_as_training(path: Path, *, may_be_boxes: bool) -> None:
    """InputError if training refuses a file, but for label vectors that no task has."""
    try:
        open_path(path)
    except InputError:
        if not may_be_boxes:
            raise
        open_path(path, labelled=False)


def _check_storage(path: Path, kind: str) -> tuple[bool, Sequence[str]]:
    """Whether each byte of an image has a checksum; and sentences on absent parts."""
    checksums = FORMATS[kind].checksums
    if FORMATS[kind].is_zip:
        with zipfile.ZipFile(path) as archive:
            return _has_crcs(archive), ()
    if checksums is not None:
        return checksums, ()
    return check_hdf5_chunks(path) if kind == "hdf5" else check_store_chunks(path)


def _wrong_classes(path: Path, packed: Sequence[str]) -> str:
    """What is wrong with the names that numbers as labels stand for; '' if nothing is."""
    try:
        names = known_classes(path)
    except InputError as error:
        return in_one_line(error, path)
    if names == tuple(packed) or not packed:  # boxes have no names
        return ""
    what = "is missing" if names is None else "has other class names than were packed"
    return f"{classes_file(path)} {what}"


def _num_classes(path: Path) -> int:
    if not classes_file(path).exists():
        return _MAX_CLASSES
    try:
        return len(named_labels([0], path, str)[0])
    except InputError:  # training reports it, too
        return _MAX_CLASSES


def check_image(record: ScannedRecord, *, deep: bool) -> ScannedRecord:
    """A record with the damage of its image."""
    if record.damage is not None:
        return record
    assert record.image is not None
    try:
        if (channels := no_color(record.image)) is not None:
            if deep:
                all_channels(record.image, channels)
        elif deep:
            decode(record.image, channels=3)
        else:
            Picture(record.image)
        if isinstance(record.label, bytes):
            require_same_size(decoded_mask(record.label), size_of(record.image))
    except DecodeError as error:
        whole = isinstance(error, UnsupportedImage) or None
        return record._replace(damage=str(error), whole=whole)
    return record


def _bad_member(path: Path) -> str | None:
    """A member of a zip file whose CRC-32 does not match; None also if the file cannot be opened."""
    with contextlib.suppress(*ZIP_ERRORS, OSError), zipfile.ZipFile(path) as archive:
        if _has_crcs(archive):
            return archive.testzip()
    return None


def _has_crcs(archive: zipfile.ZipFile) -> bool:
    """False for archives with zeros as checksums, as torch.serialization.set_crc32_options(False) writes."""
    return any(info.CRC for info in archive.infolist())


# ---------------------------------------------------------------- saving good records


def check_salvage(path: Path, kind: str, dst: Path) -> None:
    """InputError if `dst` cannot take the good records of a file."""
    if kind == "folder":
        if dst.suffix:
            raise InputError(f"{dst} has an ending, but {path} is a folder of images")
    elif target_kind(dst) != kind:
        raise InputError(
            f"{dst} is of another format than {path}\nName a file ending in {path.suffix}"
        )
    if dst.exists():
        raise InputError(f"{dst} exists\nName another file to save the good records in")
    require_folder(dst)


def _save(good: Iterator[ScannedRecord], path: Path, kind: str, dst: Path) -> bool:
    """Write records into a new file of the same format, which gets its name when it is complete."""
    first = next(good, None)
    if first is None:
        return False
    with name_disk_errors(dst, dst.parent):
        folder = dst.with_name(f".{dst.name}.salvaging")
        if folder.exists():
            shutil.rmtree(folder)  # left by a killed process
        folder.mkdir()
        try:
            target = folder / dst.name
            if FORMATS[kind].is_walked:
                _save_raw(path, itertools.chain([first], good), kind, target)
            else:
                _save_records(itertools.chain([first], good), first.image, kind, target)
            classes = classes_file(path)
            if kind == "folder":
                for names in (*path.glob(CLASS_NAMES), *path.glob(f"*/{CLASS_NAMES}")):
                    copy = target / names.relative_to(path)
                    if copy.parent.is_dir():  # else it has no good images
                        shutil.copyfile(names, copy)
            if kind != "folder" and classes.is_file():
                shutil.copyfile(classes, folder / classes_file(target).name)
            sync_below(folder, at_once=kind == "folder")
            for made in sorted(folder.iterdir(), key=lambda made: made == target):
                if not (made != target and dst.with_name(made.name).exists()):
                    made.rename(dst.with_name(made.name))
            Disk().sync_folder(dst.parent)
            return True
        finally:
            remove_or_say(folder)


def _save_raw(path: Path, records: Iterator[ScannedRecord], kind: str, target: Path) -> None:
    taken: set[Any] = set()
    if kind in TABLES:
        save_rows(records, kind, target)
    elif kind == "tfrecord":
        with TFRecordWriter(target) as tf_writer:
            for record in records:
                tf_writer.write(record.content)
    elif kind in ("tar", "zip"):
        with TarWriter(target) if kind == "tar" else ZipWriter(target) as writer:
            for record in records:
                key, files = record.content
                if key not in taken:
                    writer.write(key, files)
                taken.add(key)
    else:
        free = itertools.count(max(index_keys(path).values(), default=-1) + 1)
        with RecordWriter(target) as rec_writer:
            for record in records:
                payload, key = record.content
                unique = next(free) if key is None or key in taken else key
                taken.add(unique)
                rec_writer.write(payload, key=unique)


def _save_records(
    records: Iterator[ScannedRecord], example: Stored | None, kind: str, target: Path
) -> None:
    layout = None if example is None or isinstance(example, bytes) else Layout.of(example)
    names: dict[int, str] = {}
    with open_writer(kind, target, layout) as write:
        for number, record in enumerate(records):
            name, label, class_name = record.content
            key = name.rpartition(".")[0] if kind == "folder" else name
            assert record.image is not None
            write(Record(key, number, label, class_name, record.image))
            names[label] = class_name
    lines = [names.get(label, f"unknown {label}") for label in range(max(names) + 1)]
    classes = classes_file(target)
    if FORMATS[kind].is_array and any(name != str(label) for label, name in names.items()):
        classes.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
