"""Packed images one by one, past damage: what `flambeau verify` checks and `--salvage` keeps."""

import mmap
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from flambeau.data.pack.salvage_records import ScannedRecord, walk_rec, walk_tfrecord
from flambeau.data.pack.salvage_tar import Sample, sample_records, walk_tar
from flambeau.data.pack.table_files import walk_table
from flambeau.data.sources.arrays.array_source import UnfitPixels
from flambeau.data.sources.folder import FolderSource, class_folders
from flambeau.data.sources.packed_formats import FORMATS
from flambeau.data.sources.path_format import kind_of, open_path
from flambeau.data.sources.source import Source
from flambeau.data.sources.zip_members import UnfitZip, ZipReader, index_zip
from flambeau.errors import DAMAGE_ERRNOS, DISK_ERRNOS, DamagedData, InputError
from flambeau.images.stand_ins import stand_in_at, why_unreadable
from flambeau.recipes.data.tar_shards import ShardError

# Tools that may recover something from a file that cannot be opened, by format.
RECOVERY: Mapping[str, str] = {
    "npy": "`numpy.memmap(PATH, DTYPE, 'r', 128, SHAPE)` reads the rows before a cut",
    "zip": "`zip -FF CUT.zip --out NEW.zip` makes its list of files anew",
    "npz": "`zip -FF CUT.npz --out NEW.zip` and `unzip NEW.zip` take the arrays out that are there",
    "pth": "`zip -FF CUT.pth --out NEW.pth` repairs it if only its end is missing",
    "hdf5": "`truncate -s SIZE`, to what it had, on a copy lets h5dump read what lies before a cut; "
    "`h5clear -s` is for one whose writer was killed",
}

# No damage: the file is missing or not readable for this user, a server does not answer, a limit is reached.
_ACCESS_ERRORS = DISK_ERRNOS - DAMAGE_ERRNOS


def scan(path: Path, kind: str) -> Iterator[ScannedRecord]:
    if path.is_file() and not path.stat().st_size:
        yield ScannedRecord("the file", 0, damage="it is empty")
        return
    if not FORMATS[kind].is_walked:
        yield from _scan_source(path, kind)
        return
    other = stand_in_at(path)
    if other is not None:
        yield ScannedRecord("the file", None, damage=f"this is {other}", whole=True)
        return
    if kind == "zip":
        yield from walk_zip(path, recovery=RECOVERY[kind])
        return
    if kind in ("parquet", "arrow"):
        try:
            yield from walk_table(path, kind)
        except InputError as error:
            whole = not isinstance(error, DamagedData)
            yield ScannedRecord("the file", None, damage=in_one_line(error, path), whole=whole)
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if kind == "rec":
            yield from walk_rec(path, data)
        else:
            yield from walk_tfrecord(data) if kind == "tfrecord" else walk_tar(data)


def _scan_source(path: Path, kind: str) -> Iterator[ScannedRecord]:
    """For formats whose records cannot be found after damage: the images, if the source can be opened."""
    try:
        parts = _parts(path)
    except InputError as error:
        other = stand_in_at(path)
        reason = in_one_line(error, path)
        if other is not None:
            yield ScannedRecord("the file", None, damage=f"this is {other}", whole=True)
        elif isinstance(error, DamagedData):
            tool = f"; {RECOVERY[kind]}" if kind in RECOVERY else ""
            yield ScannedRecord("the file", None, damage=reason + tool)
        else:
            yield ScannedRecord("the file", None, damage=reason, whole=None)
        return
    for source in parts:
        labels = source.labels.tolist()
        names = source.names
        for index in range(len(source)):
            name = source.describe(index).removeprefix(str(path.absolute()))
            name = name.removeprefix(str(path)).lstrip("/, ")
            content = (
                name if path.is_dir() else names[index],
                labels[index],
                source.classes[labels[index]],
            )
            try:
                image = source.read(index)
            except OSError as error:
                whole = isinstance(error, UnfitPixels) or error.errno in _ACCESS_ERRORS
                yield ScannedRecord(name, None, damage=why_unreadable(error), whole=whole)
                continue
            except InputError as error:
                cannot_tell = None if not isinstance(error, DamagedData) else False
                yield ScannedRecord(name, None, damage=in_one_line(error, path), whole=cannot_tell)
                continue
            yield ScannedRecord(name, None, image, source.classes[labels[index]], content)


def in_one_line(error: InputError, path: Path) -> str:
    """Problem and remedy on one line, without the path."""
    problem = "; ".join(str(error).splitlines()).removeprefix(str(path)).lstrip(":, ")
    return problem.removeprefix("is ")


def _parts(path: Path) -> list[Source]:
    """The images of a file; of a folder also those in its train/ and val/."""
    if path.is_dir() and kind_of(path) is None:
        below = [folder for folder in sorted(class_folders(path)) if class_folders(folder)]
        return [FolderSource(folder) for folder in below or [path]]
    return [source for source in open_path(path) if source is not None]


def walk_zip(path: Path, *, recovery: str) -> Iterator[ScannedRecord]:
    """Samples and damage of a zip, in the order of reading.

    `recovery`: what may help where its list of files is damaged.
    """
    try:
        reader = ZipReader(path, index_zip(path))
    except ShardError as error:
        problem = str(error).removeprefix(str(path)).lstrip(":, ")
        is_unfit = isinstance(error, UnfitZip)
        damage = problem if is_unfit else f"{problem}; {recovery}"
        yield ScannedRecord("the file", None, damage=damage, whole=is_unfit)
        return
    yield from sample_records(lambda read: _samples(reader, read))


def _samples(reader: ZipReader, read: Container[str] | None) -> Iterator[Sample | ScannedRecord]:
    for number, key in enumerate(reader.keys):
        files = {}
        try:
            for extension in reader.extensions(number):
                wanted = read is None or extension in read
                files[extension] = reader.read(number, extension) if wanted else b""
        except ShardError as error:
            damage = str(error).rpartition(": ")[2]
            name = f"{key}.{extension}".encode(errors="backslashreplace").decode()
            yield ScannedRecord(name, None, damage=damage)
            continue
        yield Sample(key, None, files)
