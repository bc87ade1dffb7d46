"""The files that `flambeau pack` puts into a store: each when it is complete, indexes and manifest last.

A file is made in a folder on the disk of the cache, uploaded whole or not at all, and removed there, so that
the disk holds one at a time. A set without its index is not finished; the same command continues it.
"""

import contextlib
import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flambeau.data.pack.output_files import (
    MANIFEST,
    Packed,
    PackFiles,
    read_manifest,
    write_classes,
    write_whole,
)
from flambeau.data.sources.open_store import KINDS, SHARDS_INDEX
from flambeau.data.sources.packed_formats import endings_of
from flambeau.data.sources.path_format import kind_of_name, open_shard, whole_name
from flambeau.data.sources.shard_index import ShardIndex, index_shard, read_index, write_index
from flambeau.data.stores.address import WRITABLE, address_of, beside, folder_of, name_of
from flambeau.data.stores.block_cache import CacheOptions, chosen_cache
from flambeau.data.stores.store import Denied, Missing, StoreFault, store
from flambeau.errors import InputError

_BEGUN = ".sending"
_SENT = ".sent.json"
_INDEX = ".index"
_FEW = 4  # objects that are asked for one by one


class StoreOutput:
    """DST in a store; `local` is the file of a disk that stands for it while it is made."""

    def __init__(self, dst: Path) -> None:
        self._address = address_of(dst)
        scheme = self._address.partition("://")[0]
        name = name_of(self._address)
        if scheme not in WRITABLE:
            known = ", ".join(f"{one}://" for one in WRITABLE)
            raise InputError(
                f"DST {self._address} is an address where nothing can be written\n"
                f"Name one that begins with {known}, or a file of a disk"
            )
        if kind_of_name(name) not in KINDS or set(name) & {*"{}*"}:
            known = " ".join(
                ending for ending in endings_of("files").split() if ending[1:] in KINDS
            )
            raise InputError(
                f"DST {self._address} is no name of a file that is packed into a store: {known}\n"
                "Pack into a file of a disk, and upload that"
            )
        cache = chosen_cache() or CacheOptions()
        key = hashlib.sha256(self._address.encode()).hexdigest()[:16]
        self.local = cache.path / "packing" / key / name

    def prepare(self) -> None:
        folder = self.local.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{folder} cannot be made, where files are before they are uploaded: "
                f"{(error.strerror or str(error)).lower()}\n"
                "Name a folder that can be written with --cache or FLAMBEAU_CACHE"
            ) from error

    def finished(self, files: PackFiles) -> Packed | None:
        """As `PackFiles.finished`; InputError: there is another one, or objects of another pack."""
        facts = self._manifest()
        if facts is None:
            self._require_free(files)
            return None
        files.check_same(facts["config"], f"{self._address} is there")
        made = [beside(self._address, name) for name in facts["files"]]
        present = self._present(facts["files"])
        for name, address in zip(facts["files"], made, strict=True):
            if name not in present:
                raise InputError(f"{address} is missing\nMake it again with --fresh")
        return Packed(made, facts["images"], facts["bad_images"], already=True)

    def send(self, files: PackFiles, number: int) -> None:
        """Upload the files of a unit that is complete, unless they have been."""
        folder = files.unit_folder(number)
        if (folder / _SENT).exists():
            self._require_sent(folder)
            return
        facts = files.unit_facts(number)
        assert facts is not None
        # Keys of records go first: without them the data would lack them.
        names = sorted(facts["files"], key=lambda name: (not name.endswith(".idx"), name))
        if not (folder / _BEGUN).exists():
            self._refuse_existing(names)
            write_whole(folder / _BEGUN, "")
        shard = next(name for name in names if not name.endswith(".idx"))
        index = self._index_of(files, folder / shard)
        if index is not None:
            (folder / _INDEX).write_bytes(write_index([index]))
        for name in names:
            self._put(folder / name, name)
        sizes = {name: (folder / name).stat().st_size for name in names}
        write_whole(folder / _SENT, json.dumps(sizes))
        for name in names:
            (folder / name).unlink()

    def publish(self, files: PackFiles, bad: Sequence[str]) -> Packed:
        """Upload what finishes the set: class names, indexes, and at last the manifest."""
        names = files.class_names_path()
        if names is not None:
            self._put_text(names.name, "".join(f"{name}\n" for name in files.classes))
        for whole, content in self._indexes(files).items():
            self._put_bytes(whole + SHARDS_INDEX, content)
        manifest = files.manifest(bad)
        text = json.dumps(manifest, ensure_ascii=False)
        self._put_text(name_of(self._address) + MANIFEST, text)
        files.remove()
        made = [beside(self._address, name) for name in manifest["files"]]
        return Packed(made, manifest["images"], bad, already=False)

    def remove_local(self) -> None:
        """The folder for what is not sent yet, once it is empty."""
        with contextlib.suppress(OSError):
            self.local.parent.rmdir()

    def set_aside(self, files: PackFiles) -> None:
        """Move what is there of these names into NAME.old-N/."""
        finals = [path.name for path in files.finals]
        names = [name_of(self._address) + MANIFEST]
        names += [f"{whole}{SHARDS_INDEX}" for whole in _wholes(finals)]
        with contextlib.suppress(InputError):
            facts = self._manifest()
            names += [] if facts is None else [*facts["files"], *facts["beside"]]
        names += [*finals, *(Path(name).with_suffix(".idx").name for name in finals)]
        present = self._present(names)
        there = [name for name in dict.fromkeys(names) if name in present]
        if not there:
            return
        known = {name_of(one.rstrip("/")) for one in self._listed()}
        free = (
            f"{name_of(self._address)}.old-{number}"
            for number in itertools.count(1)
            if f"{name_of(self._address)}.old-{number}" not in known
        )
        aside = beside(self._address, next(free))
        # The manifest and the indexes first: what is left is no finished set.
        for name in there:
            old = beside(self._address, name)
            store().copy(old, f"{aside}/{name}")
            store().remove(old)

    # ------------------------------------------------------------ objects

    def _listed(self) -> list[str]:
        try:
            return store().listed(folder_of(self._address))
        except Missing:
            return []

    def _present(self, names: Sequence[str]) -> set[str]:
        """Those of some objects that are there: of many by one request, where the store lists."""
        if len(names) > _FEW:
            with contextlib.suppress(Denied):
                return {name_of(one) for one in self._listed()} & {*names}
        return {name for name in names if self._is_there(beside(self._address, name))}

    def _is_there(self, address: str) -> bool:
        try:
            store().facts(address)
        except Missing:
            return False
        return True

    def _manifest(self) -> dict[str, Any] | None:
        try:
            data = store().read_whole(self._address + MANIFEST)
        except Missing:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "pack.json")
            path.write_bytes(data)
            try:
                return read_manifest(path)
            except InputError as error:
                text = str(error).replace(str(path), self._address + MANIFEST)
                raise type(error)(text) from error

    def _require_free(self, files: PackFiles) -> None:
        begun = {
            path.name
            for number in range(len(files.finals))
            if (files.unit_folder(number) / _BEGUN).exists()
            for path in [files.finals[number]]
        }
        names = [path.name for path in files.finals if path.name not in begun]
        self._refuse_existing([*names, *(f"{one}{SHARDS_INDEX}" for one in _wholes(names))])
        path = files.class_names_path()
        if path is None:
            return
        address = beside(self._address, path.name)
        with contextlib.suppress(Missing):
            if store().read_whole(address).decode(errors="replace").split("\n")[:-1] != [
                *files.classes
            ]:
                raise InputError(f"{address} exists and names other classes\nName another DST")

    def _refuse_existing(self, names: Sequence[str]) -> None:
        present = self._present(names)
        first = next((name for name in names if name in present), None)
        if first is not None:
            raise InputError(
                f"{beside(self._address, first)} exists\n"
                "Name another DST, or give --fresh, which sets aside what is there"
            )

    def _require_sent(self, folder: Path) -> None:
        for name, size in json.loads((folder / _SENT).read_text()).items():
            address = beside(self._address, name)
            if not self._is_there(address) or store().facts(address).size != size:
                raise InputError(
                    f"{address} is not there any more as it was uploaded\nGive --fresh to start again"
                )

    def _put(self, path: Path, name: str) -> None:
        address = beside(self._address, name)
        store().put(path, address)
        size = path.stat().st_size
        if store().facts(address).size != size:
            raise StoreFault(
                f"{address} has not the {size:,} bytes that were uploaded\nGive the same command again"
            )

    def _put_bytes(self, name: str, data: bytes) -> None:
        path = self.local.with_name(f".{name}.sending")
        try:
            path.write_bytes(data)
            self._put(path, name)
        finally:
            path.unlink(missing_ok=True)

    def _put_text(self, name: str, text: str) -> None:
        self._put_bytes(name, text.encode())

    # ------------------------------------------------------------ indexes

    def _index_of(self, files: PackFiles, shard: Path) -> ShardIndex | None:
        """The index of a file that is not uploaded yet; None if it cannot be trained on, as one of boxes."""
        classes = files.class_names_path()
        beside_it = None if classes is None else shard.with_name(classes.name)
        try:
            if beside_it is not None:
                write_classes(beside_it, files.classes)
            with (
                # A table's copy is still open; what NFS and FUSE keep of it goes with the shard's folder.
                tempfile.TemporaryDirectory(
                    dir=shard.parent, prefix=".", ignore_cleanup_errors=True
                ) as copies,
                contextlib.suppress(InputError),
            ):
                opened = open_shard(shard, copies=Path(copies))
                return index_shard(shard, opened, where=beside(self._address, shard.name))
        finally:
            if beside_it is not None:
                beside_it.unlink(missing_ok=True)
        return None

    def _indexes(self, files: PackFiles) -> dict[str, bytes]:
        """The content of the index of each set whose shards all have one."""
        shards: dict[str, list[ShardIndex | None]] = {}
        for number, path in enumerate(files.finals):
            index = files.unit_folder(number) / _INDEX
            one = read_index(index.read_bytes(), str(index))[0] if index.exists() else None
            shards.setdefault(str(whole_name(Path(path.name))), []).append(one)
        complete: dict[str, list[ShardIndex]] = {
            whole: [one for one in of_set if one is not None]
            for whole, of_set in shards.items()
            if None not in of_set
        }
        return {whole: write_index(of_set) for whole, of_set in complete.items()}


def _wholes(names: Sequence[str]) -> Iterator[str]:
    yield from dict.fromkeys(str(whole_name(Path(name))) for name in names)
