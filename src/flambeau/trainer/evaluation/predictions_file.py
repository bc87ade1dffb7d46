"""A CSV file with a row per image and its predictions."""

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
_BUFFER_CHARS = 1 << 16


def refuse_existing(
    path: Path, *, suffixes: Sequence[str], force: bool, remedy: str = "force=True"
) -> None:
    """Refuse to overwrite a file without `force`, and a folder or device in any case.

    Args:
        remedy: how the caller can replace a file, such as a flag; '' if it cannot.

    Raises:
        InputError: `path` exists, has another ending, or its folder does not exist.
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
    """Write a CSV file whole or, after an error, not at all.

    The columns are path, label, predicted, probability, predicted_2, probability_2 ... It is UTF-8; bytes of
    a path that are not text are escaped.

    Yields:
        A function that takes the path of an image, its label (None if unknown) and its ranking.

    Raises:
        InputError: not NAME.csv, no such folder, or the file exists and not `force`.
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
            if text.tell() > _BUFFER_CHARS:
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
