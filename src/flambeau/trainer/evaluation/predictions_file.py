"""A CSV file with a row per image: what it is, and what the model says of it."""

import contextlib
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from flambeau.errors import InputError, require_folder
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk, replacing

Ranking = Sequence[tuple[str, float]]
"""(class, probability) pairs, the most probable first."""

SUFFIXES = (".csv",)
_AT_ONCE = 1 << 16  # characters that are kept before they are written


def refuse_existing(
    path: Path, *, suffixes: Sequence[str], force: bool, remedy: str = "force=True"
) -> None:
    """Refuse to write over a file, unless that is wanted, and over a folder or a device in any case.

    Args:
        path: to be written.
        suffixes: which it may end with.
        force: replace a file.
        remedy: how the caller lets a file be replaced: the command has a flag; '' if it does not.

    Raises:
        InputError: there is something at `path`, or it has another ending, or there is no folder for it.
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
    path: Path, *, top: int, force: bool = False
) -> Iterator[Callable[[str, str | None, Ranking], None]]:
    """Write a CSV file, which is there when all of it is; after an error nothing has changed.

    The columns are path, label, predicted, probability, predicted_2, probability_2 ... It is UTF-8; what
    is no text in a path stands as an escape.

    Args:
        path: NAME.csv, in a folder that exists.
        top: how many classes each row names.
        force: replace a file.

    Yields:
        A function that takes the path of an image, its label (None if it is not known) and its ranking.

    Raises:
        InputError: another ending, no such folder, or the file exists and not `force`.
        OSError: the disk is full or failing.
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

        def add(image: str, label: str | None, ranking: Ranking) -> None:
            named = [part for name, share in ranking for part in (name, f"{share:.6f}")]
            rows.writerow([image, label or "", *named])
            if text.tell() > _AT_ONCE:
                flush()

        try:
            rest = [
                f"{what}_{k}" for k in range(2, top + 1) for what in ("predicted", "probability")
            ]
            rows.writerow(["path", "label", "predicted", "probability", *rest])
            yield add
            flush()
            disk.sync(file)
        finally:
            disk.close(file)
