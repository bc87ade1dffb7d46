"""Masks that are being made, in a hidden folder until all of them are there; a later start continues."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from PIL import Image

from flambeau.data.pack.output_files import (
    hidden_folder,
    locked_folder,
    remove_folder,
    sync_file,
    write_whole,
)
from flambeau.data.sources.masks.mask_file import Mask
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk

_PLAN = "source.txt"
_MASKS = "masks"
_NEXT = "next.png"


class UnfinishedMasks:
    """The masks of the table NAME.csv, which become the folder NAME_masks; the table is written after all of
    them.

    `source` changes with whatever decides what the masks are. InputError: the table is there, or the folder,
    and no earlier start from this source has made it.
    """

    def __init__(self, table: Path, source: str) -> None:
        self.folder = table.with_name(f"{table.stem}_masks")
        self._table, self._source = table, source
        self._hidden = hidden_folder(table)
        self._masks = self._hidden / _MASKS
        if table.exists() and not self._masks.exists():  # killed as the last thing was removed
            remove_folder(self._hidden)
        _refuse_existing(table)
        if not self._is_moved():
            _refuse_existing(self.folder)

    def _is_begun(self) -> bool:
        """Whether an earlier start has begun from the same source."""
        plan = self._hidden / _PLAN
        return plan.is_file() and plan.read_text(encoding="utf-8") == self._source

    def _is_moved(self) -> bool:
        return self._is_begun() and self.folder.exists() and not self._masks.exists()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Keep another process out, and what is unfinished when the context is left by an error."""
        with locked_folder(self._hidden, self._table, plan=_PLAN):
            if not self._is_begun():
                remove_folder(self._masks)  # of another source
                self._masks.mkdir()
                write_whole(self._hidden / _PLAN, self._source)
            elif not self._is_moved():
                self._masks.mkdir(exist_ok=True)
            try:
                yield
            except BaseException:
                if self._masks.exists() and not any(self._masks.rglob("*.png")):
                    (self._hidden / _PLAN).unlink()  # nothing that could be continued
                raise
            (self._hidden / _PLAN).unlink()

    def has(self, name: PurePosixPath) -> bool:
        """Whether this start or an earlier one has made a mask."""
        return ((self.folder if self._is_moved() else self._masks) / name).is_file()

    def write(self, name: PurePosixPath, mask: Mask) -> None:
        file = (self.folder if self._is_moved() else self._masks) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        written = io.BytesIO()
        Image.fromarray(mask).save(written, "PNG")
        temporary = self._hidden / _NEXT
        temporary.write_bytes(written.getvalue())
        sync_file(temporary)
        temporary.rename(file)

    def move(self) -> None:
        """Give the folder its name: all masks have been made."""
        if not self._is_moved():
            _refuse_existing(self.folder)
            self._masks.rename(self.folder)
            Disk().sync_folder(self.folder.parent)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists\nName another DST, or remove it")
