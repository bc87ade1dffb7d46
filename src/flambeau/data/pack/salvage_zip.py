"""The samples of a .zip file, past damage inside of its files; its list of files must be whole."""

from collections.abc import Container, Iterator
from pathlib import Path

from flambeau.data.pack.salvage_records import ScannedRecord
from flambeau.data.pack.salvage_tar import Sample, sample_records
from flambeau.data.sources.zip_members import UnfitZip, ZipReader, index_zip
from flambeau.recipes.data.tar_shards import ShardError


def walk_zip(path: Path, *, recovery: str) -> Iterator[ScannedRecord]:
    """Samples and damage of a zip, in the order in which they are read.

    Args:
        recovery: what may help where its list of files is damaged.
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
