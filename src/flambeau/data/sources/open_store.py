"""Opens shards of packed images that lie in a store, as `open_data` opens those of the local disk.

A shard of `flambeau pack --shards` is known by the index beside it. Any other one is read once: it is put
into a temporary file, which the sources of local files parse, and what they find is kept beside the cache.
"""

import contextlib
import fnmatch
import functools
import hashlib
import re
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import IO, NamedTuple, NoReturn, cast

from flambeau.data.sources.class_names_file import class_name_files
from flambeau.data.sources.folder import IMAGE_SUFFIXES
from flambeau.data.sources.listing import split
from flambeau.data.sources.masks.masked_source import MaskedSource
from flambeau.data.sources.packed_formats import FORMATS, endings_of
from flambeau.data.sources.path_format import (
    TRAIN_FOLDERS,
    VAL_FOLDERS,
    kind_of_name,
    open_shard,
    part_of_name,
    shard_total,
    whole_name,
)
from flambeau.data.sources.shard_index import (
    ShardIndex,
    content_of,
    index_shard,
    read_index,
    write_index,
)
from flambeau.data.sources.source import ConcatSource, Source, parts_of
from flambeau.data.sources.store_files import cache_of
from flambeau.data.sources.store_shards import StoreShard, masked_shard
from flambeau.data.sources.tables.columns import NamesFiles
from flambeau.data.sources.targets import FOUND, TargetChoice, as_learned
from flambeau.data.stores.address import WRITABLE, address_of, beside, expanded, folder_of, name_of
from flambeau.data.stores.block_cache import CacheOptions, chosen_cache
from flambeau.data.stores.store import Denied, Missing, ObjectFacts, store
from flambeau.errors import InputError
from flambeau.unfinished_file import unfinished

KINDS = ("tar", "zip", "rec", "tfrecord", "parquet", "arrow")
"""The formats of shards that are read from a store."""

SHARDS_INDEX = ".flambeau-shards"
"""Ending of the index that `flambeau pack --shards` writes: behind the whole name of the shards."""

_OTHER_FILES = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".7z", ".jpg", ".jpeg", ".png")

_LONGEST_S = 3600.0  # that another process may take for the index of a shard
_AT_ONCE = 4  # foreign shards that are read for their index; each needs its size of disk meanwhile

_NUM_SHARDS = 16  # in the advice for single images; of most sets some 100 MB to some GB each

Opened = tuple[Source, Source | None]


class SingleObjects(InputError):
    """Images in a store that are objects of their own, which `flambeau pack` alone reads."""


def _single_objects(address: str, what: str) -> SingleObjects:
    name = Path(name_of(address.rstrip("/"))).stem or "images"
    is_bucket = folder_of(address).endswith("//")
    goal = f"{name}.tar"
    if address.partition(":")[0] in WRITABLE and not is_bucket:
        goal = beside(address.rstrip("/"), goal)
    command = shlex.join(["flambeau", "pack", address, goal, "--shards", f"{_NUM_SHARDS}"])
    return SingleObjects(
        f"{address} {what}, and a training would wait for a request for each\n"
        f"Pack them once, and train on what it makes: {command}"
    )


def open_address(
    data: str | Path,
    *,
    labelled: bool = True,
    choice: TargetChoice = FOUND,
    cache: CacheOptions | None = None,
) -> Opened:
    """The images to train on, and to validate on if the names of shards or folders say which.

    Args:
        data: the address of a shard; of several, by braces or *; of a set by its whole name; or of a folder.
        cache: None: that of `cache_chosen`, else the default.
    """
    opener = _Opener(address_of(data), labelled, choice, cache)
    train, val = opener.found()
    source, own_val = opener.opened(train, choice)
    if not val:
        return source, own_val
    both = _all_of((source, own_val))
    return both, _all_of(opener.opened(val, as_learned(both, choice)))


def open_evaluated(
    data: str | Path,
    *,
    labelled: bool = True,
    choice: TargetChoice = FOUND,
    cache: CacheOptions | None = None,
) -> Opened:
    """As `open_address`; of shards or folders for training and for validation only the latter."""
    opener = _Opener(address_of(data), labelled, choice, cache)
    train, val = opener.found()
    if val and opener.says_parts:
        return _all_of(opener.opened(val, choice)), None
    return opener.opened(train, choice)


class IndexedShard(NamedTuple):
    """A shard, the facts of its index, and the address of that."""

    address: str
    facts: ShardIndex
    index_of: str


def indexed_shards(data: str | Path) -> list[IndexedShard]:
    """All shards of an address, also missing ones of a set.

    Raises:
        InputError: shards without an index of `flambeau pack --shards`.
    """
    return _Opener(address_of(data), True, FOUND, None).indexed()


def _all_of(opened: Opened) -> Source:
    source, val = opened
    return source if val is None else ConcatSource([source, val])


class _Opener:
    """The shards of one address.

    Attributes:
        says_parts: names or folders divide what the address names itself into parts.
    """

    def __init__(
        self, address: str, labelled: bool, choice: TargetChoice, cache: CacheOptions | None
    ) -> None:
        self._address, self._labelled, self._choice = address, labelled, choice
        self._cache = cache or chosen_cache() or CacheOptions()
        self._packed: dict[str, tuple[ShardIndex, str]] = {}
        self._small: dict[str, bytes | None] = {}
        self._lock = threading.Lock()
        self.says_parts = False

    def found(self) -> tuple[list[str], list[str]]:
        """The addresses of the shards to train on, and of those to validate on."""
        addresses = expanded(self._address)
        shards = [
            shard
            for address in addresses
            for shard in (self._globbed(address) if "*" in address else [address])
        ]
        if self._is_pattern:
            return self._divided(self._checked(shards))
        [address] = addresses
        if kind_of_name(name_of(address)) is None:
            if Path(name_of(address)).suffix.lower() in _OTHER_FILES:
                self._refuse(address)
            return self._of_folder(address)
        return self._checked(self._of_name(address)), self._beside(address)

    def opened(self, shards: Sequence[str], choice: TargetChoice) -> Opened:
        """The images of shards, one after the other."""
        self._read_indexes(shards)
        one = functools.partial(self._one, choice=choice)
        if all(shard in self._packed for shard in shards):
            opened = [*map(one, shards)]
        else:
            with ThreadPoolExecutor(_AT_ONCE, "index-shards") as pool:
                opened = [*pool.map(one, shards)]
        if len(opened) == 1:
            source, val = opened[0]
            return opened[0] if val is not None else split(source, parts_of(source))
        for shard, (_, val) in zip(shards, opened, strict=True):
            if val is not None:
                raise InputError(
                    f"{shard} has a validation part of its own and stands among other files\n"
                    "Name it alone"
                )
        sources = [source for source, _ in opened]
        masked = [source for source in sources if isinstance(source, MaskedSource)]
        if len(masked) == len(sources):
            MaskedSource.share_classes(masked, choice)
        both = ConcatSource(sources)
        return split(both, parts_of(both))

    def indexed(self) -> list[IndexedShard]:
        """See `indexed_shards`."""
        shards = [shard for part in self.found() for shard in part]
        self._read_indexes(shards)
        without = next((shard for shard in shards if shard not in self._packed), None)
        if without is not None:
            whole = whole_name(Path(name_of(without)))
            raise InputError(
                f"{without} has no index, {whole}{SHARDS_INDEX}, to compare its images with\n"
                "Copy it to a disk, and verify it there; flambeau pack --shards writes an index"
            )
        # By braces or * some shards are meant; a set and a folder are meant as a whole.
        chosen = shards if self._is_pattern else [*dict.fromkeys([*shards, *self._packed])]
        return [IndexedShard(shard, *self._packed[shard]) for shard in chosen]

    @property
    def _is_pattern(self) -> bool:
        return "*" in self._address or len(expanded(self._address)) > 1

    def _read_indexes(self, shards: Sequence[str]) -> None:
        for shard in shards:
            if shard in self._packed:
                continue
            name = name_of(shard)
            whole = str(whole_name(Path(name)))
            if whole != name:
                self._read_packed(beside(shard, whole))

    def _one(self, shard: str, choice: TargetChoice) -> Opened:
        """The images of a shard; those of a table are not divided into parts yet."""
        packed = self._packed.get(shard)
        if packed is not None and _is_answered(packed[0], self._labelled, choice):
            index = packed[0]
            index_of: str | None = packed[1]
        else:
            index = self._foreign(shard, choice)
            index_of = None
        sources = []
        for part in index.parts:
            images = StoreShard(shard, part, self._cache, index_of=index_of)
            if part.masks is None:
                sources.append(images)
                continue
            masked = masked_shard(shard, images, part.masks, choice)
            if kind_of_name(name_of(shard)) in ("tar", "zip"):
                return split(masked, part.parts)
            return masked, None
        return sources[0], sources[1] if len(sources) > 1 else None

    # ------------------------------------------------------------ which shards

    def _of_name(self, address: str) -> list[str]:
        """The shards of the address of one object, or of a set by its whole name."""
        if self._read_packed(address):
            return [*self._packed]
        try:
            store().facts(address)
        except Missing as error:
            shards = self._set_of(address)
            if shards:
                return shards
            suffix = Path(name_of(address)).suffix
            train = f"{address.removesuffix(suffix)}_train{suffix}"  # as `pack` calls that part
            if self._exists(train + SHARDS_INDEX) or self._exists(train):
                raise Missing(f"{address} is not there; did you mean {train}?") from error
            raise
        return [address]

    def _set_of(self, address: str) -> list[str]:
        name = name_of(address)
        listed = self._listed(folder_of(address), is_asked=False)
        shards = [
            one
            for one in listed
            if name_of(one) != name and str(whole_name(Path(name_of(one)))) == name
        ]
        totals = {shard_total(name_of(one)) for one in shards}
        if shards and totals != {len(shards)}:
            raise InputError(
                f"{address} is a set of shards, of which {len(shards)} are there: {shards[0]} ...\n"
                "Upload the others, or name one of them"
            )
        return shards

    def _beside(self, address: str) -> list[str]:
        """The shard to validate on beside NAME_train.EXT, as on a local disk."""
        path = Path(name_of(address))
        stem = path.name.removesuffix(path.suffix)
        if not re.search(r"(?:^|[_-])train$", stem) or self._packed:
            return []
        for word in VAL_FOLDERS:
            other = beside(address, stem.removesuffix("train") + word + path.suffix)
            if self._exists(other):
                return [other]
        return []

    def _of_folder(self, address: str) -> tuple[list[str], list[str]]:
        folder = address.rstrip("/") + "/"
        listed = self._listed(folder)
        shards = self._shards_among(listed)
        below = {name_of(one.rstrip("/")).lower(): one for one in listed if one.endswith("/")}
        if not shards:
            train = next((below[name] for name in TRAIN_FOLDERS if name in below), None)
            val = next((below[name] for name in VAL_FOLDERS if name in below), None)
            if train is not None and val is not None:
                parts = [self._shards_among(self._listed(one)) for one in (train, val)]
                if any(parts):
                    self.says_parts = True
                    return self._of_part(train, parts[0]), self._of_part(val, parts[1])
            if len(below) == 1:
                shards = self._shards_among(self._listed(next(iter(below.values()))))
        if not shards and self._holds_images(listed):
            raise _single_objects(folder, "holds images one by one")
        return self._divided(self._of_part(address, shards))

    def _of_part(self, folder: str, shards: list[str]) -> list[str]:
        """The shards that were found in a folder; InputError for none."""
        if not shards:
            raise InputError(
                f"{folder} holds no shards of packed images that are read from a store\n"
                f"Expected {_endings()}; anything else: copy it to a disk first"
            )
        return self._checked(shards)

    def _holds_images(self, listed: Sequence[str]) -> bool:
        """Whether images lie here, or in the first folders below: of classes, perhaps within train/."""
        level = listed
        for _ in range(3):
            if any(Path(name_of(one)).suffix.lower() in IMAGE_SUFFIXES for one in level):
                return True
            folders = [one for one in level if one.endswith("/")]
            level = [one for folder in folders[:2] for one in self._listed(folder)]
        return False

    def _shards_among(self, listed: Sequence[str]) -> list[str]:
        names = [one for one in listed if not name_of(one).startswith(".")]
        kinds = [kind_of_name(name_of(one)) for one in names]
        return [
            one
            for one, kind in zip(names, kinds, strict=True)
            if kind is not None and FORMATS[kind].is_sharded
        ]

    def _divided(self, shards: list[str]) -> tuple[list[str], list[str]]:
        """Shards whose names say training, and those that say validation; all, if not both are there."""
        parts: dict[str, list[str]] = {}
        for shard in shards:
            parts.setdefault(part_of_name(name_of(shard)), []).append(shard)
        train = next((parts[name] for name in TRAIN_FOLDERS if name in parts), [])
        val = next((parts[name] for name in VAL_FOLDERS if name in parts), [])
        self.says_parts = bool(train and val)
        return (train, val) if self.says_parts else (shards, [])

    def _checked(self, shards: list[str]) -> list[str]:
        """InputError for shards of several formats, or of one that is not read from a store."""
        kinds = {kind_of_name(name_of(shard)): shard for shard in shards}
        if len(kinds) > 1:
            raise InputError(
                f"{self._address} stands for files of several formats, such as "
                f"{' and '.join(name_of(one) for one in [*kinds.values()][:2])}\nName those of one"
            )
        odd = next((shard for kind, shard in kinds.items() if kind not in KINDS), None)
        if odd is not None:
            self._refuse(odd)
        return shards

    def _refuse(self, address: str) -> NoReturn:
        if kind_of_name(name_of(address)) == "listing":
            raise _single_objects(address, "names images one by one")
        raise InputError(
            f"{address} is not of a format that is read from a store: {_endings()}\n"
            "Copy it to a disk first, or make shards: flambeau pack SRC NAME.tar --shards N"
        )

    def _globbed(self, address: str) -> list[str]:
        folder = folder_of(address)
        pattern = name_of(address)
        if "*" in folder:
            raise InputError(f"{address}: * may stand in the last part of an address alone")
        names = [one for one in self._listed(folder) if not one.endswith("/")]
        found = [one for one in names if fnmatch.fnmatchcase(name_of(one), pattern)]
        found = [one for one in found if kind_of_name(name_of(one)) is not None]
        if not found:
            raise InputError(
                f"{address}: no shard in {folder} has such a name\nSee what lies there"
            )
        return found

    def _listed(self, folder: str, *, is_asked: bool = True) -> list[str]:
        try:
            return store().listed(folder)
        except (Missing, Denied) as error:
            if not is_asked:
                return []
            why = str(error).splitlines()[0].removeprefix(folder).lstrip(": ")
            raise InputError(
                f"{folder}: the store gives no list of what lies there ({why})\n"
                "Name the shards, NAME-{00000..00127}.tar, or see that the folder is there and may be listed"
            ) from error

    def _exists(self, address: str) -> bool:
        try:
            store().facts(address)
        except Missing:
            return False
        return True

    # ------------------------------------------------------------ what is in them

    def _read_packed(self, address: str) -> bool:
        """Read the index beside a set of shards, if there is one."""
        index = address + SHARDS_INDEX
        if index not in self._small:
            data = self._small_file(index)
            if data is not None:
                for shard in read_index(data, index, scratch=self._cache.path):
                    self._packed[beside(address, shard.name)] = shard, index
                self._small[index] = b""  # that it is there is all that is asked from now on
        return self._small[index] is not None

    def _small_file(self, address: str) -> bytes | None:
        """The content of a small object, which is asked for once; None if there is none."""
        with self._lock:
            if address not in self._small:
                try:
                    self._small[address] = store().read_whole(address)
                except Missing:
                    self._small[address] = None
            return self._small[address]

    def _foreign(self, shard: str, choice: TargetChoice) -> ShardIndex:
        """The index of a shard that has none: kept from before, or made now."""
        facts = store().facts(shard)
        if not facts.size:
            raise InputError(f"{shard} is empty\nUpload it again")
        files = self._files_beside(shard)
        wanted = f"{shard} {facts} {sorted(files.items())} {self._labelled} {choice}"
        key = hashlib.sha256(wanted.encode()).hexdigest()[:32]
        kept = self._cache.path / "indexes" / f"{key}.npz"
        # Of the ranks of a training, which open the same shards at once, one fetches each of them.
        with cache_of(self._cache).alone(key, time.monotonic() + _LONGEST_S, kind="index"):
            if kept.is_file():
                try:
                    return read_index(kept.read_bytes(), str(kept))[0]
                except (InputError, OSError):
                    kept.unlink(missing_ok=True)
            index = self._made(shard, facts, files, choice)
            _keep(kept, write_index([index]))
            return index

    def _files_beside(self, shard: str) -> dict[str, bytes]:
        """The small files beside a shard that say something of it: class names, and the keys of records."""
        path = Path(name_of(shard))
        names = [one.name for one in class_name_files(path)]
        if kind_of_name(path.name) == "rec":
            names.append(path.with_suffix(".idx").name)
        found = {}
        for name in names:
            data = self._small_file(beside(shard, name))
            if data is not None:
                found[name] = data
        return found

    def _made(
        self, shard: str, facts: ObjectFacts, files: dict[str, bytes], choice: TargetChoice
    ) -> ShardIndex:
        cache = cache_of(self._cache)
        try:
            with cache.new_folder() as folder:
                path = folder / name_of(shard)
                for name, data in files.items():
                    (folder / name).write_bytes(data)
                with path.open("wb") as file:
                    store().download(shard, facts, cast(IO[bytes], file))
                with _in_words_of(shard, path):
                    opened = open_shard(path, labelled=self._labelled, choice=choice, copies=folder)
                    index = index_shard(path, opened, where=shard)
                for part in index.parts:
                    StoreShard(shard, part, self._cache).files.keep(content_of(path, opened, part))
                return index
        except NamesFiles as error:
            raise _single_objects(shard, "names images one by one") from error
        except OSError as error:
            raise InputError(
                f"{shard} cannot be put into {cache.path}, to be read once for its index: "
                f"{(error.strerror or str(error)).lower()}\nMake room there, name another folder with "
                "--cache, or pack the shards with `flambeau pack --shards`, which writes an index"
            ) from error


def _is_answered(index: ShardIndex, labelled: bool, choice: TargetChoice) -> bool:
    """Whether the index of all that is found in a shard is what opening it with a choice would give."""
    plain = replace(choice, of_others=False, mask_classes=())
    if choice.of_others:
        plain = replace(plain, columns=(), ignore_index=None, group=None, split=None)
    tasks = {part.target_task for part in index.parts}
    if tasks == {"segmentation"}:
        plain = replace(plain, ignore_index=None)
    return labelled and plain in (FOUND, *(replace(FOUND, task=task) for task in tasks))


def _keep(path: Path, data: bytes) -> None:
    """Write an index for the next time; without it the shard is read again."""
    temporary = unfinished(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)


def _endings() -> str:
    known = [ending for ending in endings_of("files").split() if ending.lstrip(".") in KINDS]
    return " ".join(known)


@contextlib.contextmanager
def _in_words_of(address: str, path: Path) -> Iterator[None]:
    """Errors about a temporary file name the object that it is a copy of."""
    try:
        yield
    except InputError as error:
        text = str(error).replace(str(path), address)
        raise type(error)(text.replace(f"{path.parent}/", folder_of(address))) from error
