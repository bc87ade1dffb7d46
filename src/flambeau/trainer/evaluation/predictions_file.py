"""A CSV file with a row per image and its predictions."""

import contextlib
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flambeau.errors import InputError, require_folder
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk, replacing

SUFFIXES = (".csv",)
_BUFFER_CHARS = 1 << 16


def refuse_existing(
    path: Path, *, suffixes: Sequence[str], force: bool, remedy: str = "force=True"
) -> None:
    """Refuse to overwrite a file without `force`, or a folder or device at all; and endings but `suffixes`.

    `remedy`: how the caller can replace a file, such as a flag; '' if it cannot.
    """
    if path.suffix.lower() not in suffixes:
        raise InputError(f"{path}: the name of this file must end with {' or '.join(suffixes)}")
    require_folder(path)
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is there and no file\nName another one")
    if path.exists() and not force:
        raise InputError(
            f"{path} exists\nName another file{f', or give {remedy}' if remedy else ''}"
        )


@contextlib.contextmanager
def predictions_file(
    path: Path, columns: Sequence[str], *, force: bool = False
) -> Iterator[Callable[[Sequence[str]], None]]:
    """Write a CSV file whole or not at all; yields a function that takes a row's cells.

    UTF-8; bytes of a path that are no text are escaped. InputError as of `refuse_existing`.
    """
    refuse_existing(path, suffixes=SUFFIXES, force=force)
    disk = Disk()
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    with replacing(path, disk=disk) as temporary:
        file = disk.create(temporary)

        def flush() -> None:
            left = memoryview(text.getvalue().encode(errors="backslashreplace"))
            while left:
                left = left[disk.write(file, left) :]
            text.seek(0)
            text.truncate()

        def add(cells: Sequence[str]) -> None:
            rows.writerow(cells)
            if text.tell() > _BUFFER_CHARS:
                flush()

        try:
            rows.writerow(columns)
            yield add
            flush()
            disk.sync(file)
        finally:
            disk.close(file)
