"""Images that are objects of their own in a store: class folders, or the rows of a table that names them.

Only `flambeau pack` reads them, once: a training would wait for a request for each image in each epoch. What
their names say is found by the sources of local files, in a folder of files without content.
"""

import contextlib
import errno
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from flambeau.data.sources.class_names_file import class_name_files
from flambeau.data.sources.folder import may_hold_labels
from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.listing import ListingSource, split
from flambeau.data.sources.masks.mask_folders import mask_pairs
from flambeau.data.sources.open_data import open_parts
from flambeau.data.sources.path_format import kind_of_name
from flambeau.data.sources.source import Source, file_of, left_out
from flambeau.data.sources.store_files import cache_of
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import TargetChoice, separator_of, task_of
from flambeau.data.stores.address import address_of, beside, folder_of, is_address, name_of
from flambeau.data.stores.block_cache import CacheOptions, chosen_cache
from flambeau.data.stores.store import Missing, store
from flambeau.errors import InputError
from flambeau.optional_packages import extra

AT_ONCE = 16
"""Images that are asked for at the same moment: what a latency of 50 ms needs for 300 per second."""

_MOST_TEXT = 64 << 20  # bytes of a file that may hold labels and is fetched; chosen


def open_single_objects(data: str | Path, choice: TargetChoice) -> tuple[Source, Source | None]:
    """The images of a table's or folder's address to train on, and to validate on if the data say which.

    InputError: there are none, or they have masks, all of which would have to be read.
    """
    address = address_of(data)
    is_table = kind_of_name(name_of(address)) in ("listing", "parquet")
    place = _Place(folder_of(address) if is_table else address.rstrip("/") + "/")
    with place.in_words_of_the_store():
        train, val = (
            _of_table(place, address, choice) if is_table else _of_folder(place, address, choice)
        )
    return SingleObjectSource(train, place), None if val is None else SingleObjectSource(val, place)


def _of_table(place: "_Place", address: str, choice: TargetChoice) -> tuple[Source, Source | None]:
    path = place.path / name_of(address)
    path.write_bytes(store().read_whole(address))
    for one in class_name_files(path):
        with contextlib.suppress(Missing):
            one.write_bytes(store().read_whole(beside(address, one.name)))
    source = ListingSource(_as_text(path), choice=choice, are_here=False)
    if source.mask_names is not None:
        raise _with_masks(address)
    return split(source, source.parts)


def _as_text(path: Path) -> Path:
    """A Parquet file that names images as a .csv beside it."""
    if path.suffix.lower() != ".parquet":
        return path
    text = path.with_suffix(".csv")
    what = f"{path}"
    table = extra("pyarrow.parquet", what=what).read_table(path)
    extra("pyarrow.csv", what=what).write_csv(table, text)
    return text


def _of_folder(place: "_Place", address: str, choice: TargetChoice) -> tuple[Source, Source | None]:
    place.fill()
    if choice.task != "classification" and mask_pairs(place.path, wanted=False) is not None:
        raise _with_masks(address)
    return open_parts(place.path, choice=choice)


def _with_masks(address: str) -> InputError:
    return InputError(
        f"{address} has masks in files of their own, which are not read from a store one by one\n"
        "Copy it to a disk, and pack that"
    )


class _Place:
    """A folder of this disk that stands for one in a store, whose address is `base`, with its last slash."""

    def __init__(self, base: str) -> None:
        self.base = base
        made = contextlib.ExitStack()
        self.path = made.enter_context(cache_of(chosen_cache() or CacheOptions()).new_folder())
        weakref.finalize(self, made.close)  # which removes it

    def fill(self) -> None:
        """Lay a file for each object, of its size, without content unless it may hold labels."""
        waiting = [self.base]
        while waiting:
            for address, size, _ in store().listed_facts(waiting.pop()):
                if address.endswith("/"):
                    waiting.append(address)
                    continue
                path = self.path / address.removeprefix(self.base)
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("xb") as file:
                        if size <= _MOST_TEXT and may_hold_labels(path.name):
                            file.write(store().read_whole(address))
                        else:
                            file.truncate(size)
                except OSError as error:
                    raise InputError(
                        f"{address} has a name that cannot stand on a disk beside the others: "
                        f"{(error.strerror or str(error)).lower()}\nRename or remove it"
                    ) from error

    def address_at(self, path: Path) -> str | None:
        """The address of what a path stands for; None for a file of this machine or of another server."""
        text = str(path)
        if not text.startswith(f"{self.path}/"):
            return None
        name = text.removeprefix(f"{self.path}/")
        if is_address(name):  # a table of one store must not read the disk of who packs it
            return (
                None
                if name.startswith("file:") != self.base.startswith("file:")
                else address_of(name)
            )
        host, _, rest = self.base.partition("://")[2].partition("/")
        parts = rest.split("/")[:-1]
        for part in name.split("/"):
            if part == "..":
                if not parts:
                    return None
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        return f"{self.base.partition('://')[0]}://{host}/{'/'.join(parts)}"

    def in_words(self, text: str) -> str:
        """A message about files here as one about objects there."""
        return text.replace(f"{self.path}/", self.base).replace(str(self.path), self.base)

    @contextlib.contextmanager
    def in_words_of_the_store(self) -> Iterator[None]:
        """Errors about files here name the objects."""
        try:
            yield
        except InputError as error:
            raise type(error)(self.in_words(str(error))) from error


class SingleObjectSource:
    """The images of a source of local `files` that stand for objects, by name."""

    def __init__(self, files: Source, place: _Place) -> None:
        self._files, self._place = files, place
        self.classes: tuple[str, ...] = files.classes
        self.labels: Tensor = files.labels
        self.task: TaskName = task_of(files)
        self.separator = separator_of(files)

    @property
    def names(self) -> Sequence[str]:
        return self._files.names

    @property
    def fingerprint(self) -> str:
        return self._files.fingerprint

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        return tuple(
            replace(one, where=self._place.in_words(one.where), first={})
            for one in left_out(self._files)
        )

    def __len__(self) -> int:
        return len(self._files)

    def describe(self, index: int) -> str:
        return self._place.in_words(self._files.describe(index))

    def read(self, index: int) -> bytes:
        path = file_of(self._files, index)
        assert path is not None  # of files alone
        address = self._place.address_at(path)
        if address is None:
            raise OSError(errno.EACCES, "the table names a file of another machine", str(path))
        try:
            return store().read_whole(address)
        except Missing as error:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), address) from error
