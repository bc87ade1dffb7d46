"""A run whose folder lies in a store, and its copies on this machine: --out s3://bucket/runs/a, and RUN.

Who trains works in a folder of this disk, whose mirror is the store. Who reads has another copy, into which
what has changed is fetched.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.data.stores.address import address_of, is_address, mirror_address, name_of
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.errors import InputError, json_object

if TYPE_CHECKING:
    from flambeau.data.stores.store import Store

_KNOWN = ".copied.json"  # of a copy for reading: the size and version of each file that was fetched
_TRIES = 3  # while a training changes the run
_copied: ContextVar[dict[str, Path] | None] = ContextVar("_copied", default=None)


def working_folder(address: str) -> Path:
    """Where a run of a store is trained on this machine, in the folder of the cache."""
    digest = hashlib.sha256(address.encode()).hexdigest()[:8]
    return CacheOptions().path / "runs" / f"{name_of(address)}-{digest}"


def folder_and_mirror(out: str | Path, mirror: str | None) -> tuple[Path, str | None]:
    """The local folder of a run, and its mirror, which `out` is if an address.

    InputError: an address that cannot be written, or another mirror beside it.
    """
    if not is_address(out):
        return Path(out), mirror
    address = mirror_address(str(out))
    if mirror is not None and mirror_address(mirror) != address:
        raise InputError(
            f"the run is to be in {address}, and mirror = {mirror!r} is another place: leave one of them out"
        )
    return working_folder(address), address


def in_store(folder: Path, mirror: str | None) -> str | None:
    """The address of a folder's run, if that is in a store."""
    return mirror if mirror is not None and folder == working_folder(mirror) else None


def is_run_in_store(address: str) -> bool:
    """Whether a run lies at an address."""
    from flambeau.data.stores.store import Denied, Missing, store

    try:
        return bool(store().facts(f"{address_of(address).rstrip('/')}/config.toml").size)
    except (Missing, Denied):  # as some stores say of what is not there
        return False


def mirror_again(folder: Path, *, say: Callable[[str], object]) -> None:
    """Bring what a command added to a finished run to any mirror."""
    from flambeau.run.folder.run_folder import RunFolder

    mirror = (RunFolder(folder).read_config() or {}).get("mirror")
    if not isinstance(mirror, str):
        return
    from flambeau.run.folder.mirror import Mirror

    say(f"the mirror {mirror} gets it, too")
    Mirror(folder, mirror, say=say).close()


def run_here(run: str | Path, say: Callable[[str], object] = lambda _: None) -> Path:
    """A run's folder: a path as it is; of one in a store a local copy, brought up to date."""
    if not is_address(run):
        return Path(run)
    from flambeau.run.folder.mirror import alone

    address = address_of(run).rstrip("/")
    copied = _copied.get()
    if copied is not None and address in copied:
        return copied[address]
    folder = working_folder(address)
    folder = folder.with_name(f"{folder.name}.read")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with alone(folder, why="another program copies this run"):
            _update(folder, address)
    except OSError as error:
        raise InputError(
            f"{address} cannot be copied to {folder}: {(error.strerror or str(error)).lower()}\n"
            "Make room there, or name another folder with FLAMBEAU_CACHE"
        ) from error
    say(f"{address} is read from its copy in {folder}")
    if copied is not None:
        copied[address] = folder
    return folder


@contextlib.contextmanager
def copied_once() -> Iterator[None]:
    """Until the end, or in the decorated function, each run of a store is brought up to date once."""
    token = _copied.set({})
    try:
        yield
    finally:
        _copied.reset(token)


def _update(folder: Path, address: str) -> None:
    from flambeau.data.stores.store import StoreFault, store

    source = store()
    for left in reversed(range(_TRIES)):
        try:
            return _copy(folder, address, source)
        except StoreFault:  # changed or removed since the list was made, as old checkpoints are
            if not left:
                raise
    raise AssertionError


def _copy(folder: Path, address: str, source: "Store") -> None:
    """Fetch what is new or has changed, and remove what was fetched and is there no more."""
    from flambeau.run.folder.mirror import files_there

    names = files_there(address, source)
    if "config.toml" not in names:
        raise InputError(
            f"{address} holds no run: there is no config.toml\nName the address of a run, as --out or "
            "--mirror had it"
        )
    known = _known(folder)
    # Checkpoints last: one that is removed meanwhile begins the copy again, and the rest is known then.
    for name in sorted(names, key=lambda name: name.startswith("checkpoints/")):
        facts = source.facts(f"{address}/{name}")
        mark = list(facts)
        path = folder / name
        if facts.version and known.get(name) == mark and path.is_file():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        with temporary.open("wb") as file:
            source.download(f"{address}/{name}", facts, file)
        temporary.replace(path)
        known[name] = mark
        _write_known(folder, known)
    for name in known.keys() - {*names}:
        (folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            (folder / name).parent.rmdir()
        del known[name]
    _write_known(folder, known)


def _known(folder: Path) -> dict[str, Any]:
    from flambeau.run.folder.mirror import leads_elsewhere

    with contextlib.suppress(OSError, ValueError, RecursionError):
        known = json.loads((folder / _KNOWN).read_bytes(), object_pairs_hook=json_object)
        if isinstance(known, dict):
            return {name: mark for name, mark in known.items() if not leads_elsewhere(name)}
    return {}


def _write_known(folder: Path, known: dict[str, Any]) -> None:
    temporary = folder / f"{_KNOWN}.part"
    temporary.write_text(json.dumps(known), encoding="utf-8")
    temporary.replace(folder / _KNOWN)
