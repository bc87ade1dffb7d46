"""A copy of a run folder in a store, from which another machine goes on: `--mirror s3://bucket/runs/a`.

A process of its own uploads: the training neither waits for the store nor has threads when workers are
forked, and after a kill of the training this process still uploads what is on the disk.

A checkpoint's manifest comes last, and goes first when the checkpoint is removed, so that a checkpoint with a
manifest is whole; metrics.jsonl comes before the manifest of a checkpoint that counts its lines. A resume
verifies every byte in any case. `mirror.json` holds a number that says which run the mirror is of.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from flambeau.data.stores.address import mirror_address
from flambeau.data.stores.store import Missing, Store
from flambeau.errors import InputError, json_object
from flambeau.run.folder.lock import is_locked
from flambeau.terminal import print_text, say
from flambeau.unfinished_file import unfinished

IDENTITY = "mirror.json"
_OWNER = "mirror.owner"  # of a mirror: the number of the process that writes there
_CHECKPOINTS = "checkpoints"
# As in the recipe atomic_checkpoint, whose import would load torch, for as long as the training lasts.
_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d+)")
_POLL_S = 1.0
_MOST_FILES = 100_000
_BEHIND = "not all of the run is in its mirror: the same command, also of a finished run, uploads the rest"


# ---------------------------------------------------------------- in the process that trains


def fetch(folder: Path, address: str, *, fresh: bool = False, is_copy: bool = False) -> str | None:
    """Bring a mirror's run to this machine, if the folder has none; what was brought, for the user.

    Args:
        fresh: a new run is about to begin in the folder.
        is_copy: the folder is of a run in the store: where that is further, it is set aside.

    Raises:
        InputError: a mirror of another run, or further than the folder; or the store does not answer.
    """
    flags = [flag for flag, is_set in (("--fresh", fresh), ("--is-copy", is_copy)) if is_set]
    words = ["fetch", str(folder), mirror_address(address), *flags]
    done = subprocess.run(
        _command(*words), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, check=False
    )
    answer = json.loads(done.stdout or "{}")
    if "refused" in answer:
        raise InputError(answer["refused"])
    if done.returncode:
        raise InputError(f"the mirror {address} could not be read: see the lines above")
    said: str | None = answer["said"]
    return said


class Mirror:
    """Keeps the mirror of a run up to date until it is closed."""

    def __init__(self, folder: Path, address: str, *, say: Callable[[str], object]) -> None:
        self._say = say
        self._process = subprocess.Popen(
            _command("follow", str(folder), mirror_address(address)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training
        )

    def close(self) -> None:
        """Wait until everything is there."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if self._process.wait():
            self._say(_BEHIND)


def _command(*words: str) -> list[str]:
    program = f"import sys; from {__name__} import main; sys.exit(main())"
    return [sys.executable, "-P", "-c", program, *words]


# ---------------------------------------------------------------- in the process that copies


def _fetched(
    folder: Path, address: str, store: Store, *, fresh: bool, is_copy: bool = False
) -> str | None:
    remote = _identity_there(address, store)
    if remote is None:
        return None
    if fresh:
        raise InputError(
            f"{address} is the mirror of the run that --fresh would set aside, and nothing there is "
            "overwritten\nName another --mirror, or none"
        )
    if not (folder / "config.toml").exists():
        return _restore(folder, address, store)
    if _identity_here(folder) != remote:
        raise InputError(
            f"{address} is the mirror of another run than that in {folder}\n"
            "Name another --mirror, or go on from that one with an --out that does not exist"
        )
    there = _steps_there(address, store)
    here = [path.name for path in _steps_here(folder)]
    newest = max(there, key=_order, default="")
    if newest and _order(newest) > max(map(_order, here), default=(0, "")):
        if is_copy and not is_locked(folder):
            taken = (folder.with_name(f"{folder.name}.old-{n}") for n in itertools.count(1))
            old = next(path for path in taken if not path.exists())
            folder.rename(old)
            said = _restore(folder, address, store)
            return f"{said}; what was in {folder}, not as far, is in {old} now"
        raise InputError(
            f"the mirror {address} has {newest}, and {folder} is not as far: the run was continued "
            "elsewhere\n"
            "Go on from the mirror with an --out that does not exist, or name another --mirror"
        )
    return None


def _restore(folder: Path, address: str, store: Store) -> str:
    whole = _steps_there(address, store)
    found = [
        name
        for name in files_there(address, store)
        if name != _OWNER
        and (not name.startswith(f"{_CHECKPOINTS}/") or name.split("/")[1] in whole)
    ]
    if "config.toml" not in found:
        raise InputError(
            f"{address} has no config.toml: nothing of the run was mirrored\nName another --mirror"
        )
    if folder.exists() and any(folder.iterdir()):
        raise InputError(
            f"{folder} holds something else than a run, and {address} would be copied there\n"
            "Choose another folder"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = unfinished(folder)
    try:
        for name in found:
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            source = f"{address}/{name}"
            with path.open("xb") as file:
                store.download(source, store.facts(source), file)
                file.flush()
                os.fsync(file.fileno())
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    newest = max(whole, key=_order, default="its beginning")
    return f"the run was brought from {address} to {folder}, with {newest}"


class _Follower:
    """Uploads what has changed in a run folder.

    It changes nothing in the mirror once the folder is gone or another one, or once another machine writes
    there: the mirror may then be all that is left of the run.
    """

    def __init__(self, folder: Path, address: str, store: Store) -> None:
        self._folder, self._address, self._store = folder, address, store
        self._run = ""  # the number of the run
        self._owner = secrets.token_hex(16)
        self._known: dict[str, tuple[int, int]] = {}
        self._there: set[str] = set()  # checkpoints of the mirror, whole or not
        self._seen: list[str] | None = None
        self._told = ""

    def follow(self) -> bool:
        """Until standard input ends; whether everything is there then."""
        while True:
            ends = bool(select.select([sys.stdin], [], [], _POLL_S)[0])
            names = [path.name for path in _steps_here(self._folder)]
            if not ends and names == self._seen:
                continue
            is_whole = self._tries()
            self._seen = names
            if ends:
                return is_whole

    def _tries(self) -> bool:
        """Whether everything is uploaded; else a message says why, once."""
        try:
            self._upload()
        except (InputError, OSError) as error:
            text = str(error).partition("\n")[0]
            if text != self._told:  # tried again at the next checkpoint
                say(f"mirror: {text}; the training goes on")
            self._told = text
            return False
        self._told = ""
        return True

    def _upload(self) -> None:
        if not self._run:
            self._begin()
        self._check_owner()
        here = _steps_here(self._folder)
        for name in _files_here(self._folder):
            self._put(name)
        for folder in here:
            self._put_checkpoint(folder)
        # Only what is older than a whole one here: a folder that is being removed loses nothing there.
        whole = [path.name for path in here if (path / _MANIFEST).exists()]
        newest = max(map(_order, whole), default=(0, ""))
        kept = {path.name for path in here}
        for name in sorted(self._there - kept):
            if _order(name) < newest:
                self._check_in_place()
                self._remove_checkpoint(name)

    def _begin(self) -> None:
        identity = _identity_here(self._folder)
        there = _identity_there(self._address, self._store)
        if there not in (None, identity):
            raise InputError(f"{self._address} is the mirror of another run; name another --mirror")
        if identity is None:
            identity = secrets.token_hex(16)
            temporary = self._folder / f".{IDENTITY}"
            temporary.write_text(json.dumps({"run": identity}), encoding="utf-8")
            temporary.replace(self._folder / IDENTITY)
        self._put(IDENTITY)
        with tempfile.TemporaryDirectory() as folder:
            owner = Path(folder) / _OWNER
            owner.write_text(self._owner, encoding="utf-8")
            self._store.put(owner, f"{self._address}/{_OWNER}")
        self._there = _step_folders_there(self._address, self._store)
        self._run = identity

    def _check_owner(self) -> None:
        """Refuse to write beside another training that has begun with this mirror since."""
        self._check_in_place()
        found = self._store.read_whole(f"{self._address}/{_OWNER}")
        if found != self._owner.encode():
            raise InputError(
                f"another training writes to {self._address} now: nothing more is uploaded from "
                f"{self._folder}"
            )

    def _check_in_place(self) -> None:
        if _identity_here(self._folder) != self._run:
            raise InputError(
                f"{self._folder} is gone or is another folder: its mirror stays as it is"
            )

    def _put(self, name: str) -> None:
        path = self._folder / name
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            facts = _facts(path)
            if self._known.get(name) != facts:
                self._store.put(path, f"{self._address}/{name}")
                self._known[name] = facts

    def _put_checkpoint(self, folder: Path) -> None:
        """Upload a whole checkpoint, unless this one is there."""
        try:
            facts = _facts(folder / _MANIFEST)
            if self._known.get(folder.name) == facts:
                return
            if folder.name in self._there:
                if self._is_same(folder):
                    self._known[folder.name] = facts
                    return
                self._remove_checkpoint(folder.name)  # made again, from an older one
            self._there.add(folder.name)
            files = sorted(folder.iterdir(), key=lambda path: (path.name == _MANIFEST, path.name))
            for path in files:
                self._store.put(path, f"{self._address}/{_CHECKPOINTS}/{folder.name}/{path.name}")
            self._known[folder.name] = facts
        except FileNotFoundError:
            return  # removed meanwhile

    def _is_same(self, folder: Path) -> bool:
        """Whether the mirror has this checkpoint, by its hashes."""
        try:
            manifest = f"{self._address}/{_CHECKPOINTS}/{folder.name}/{_MANIFEST}"
            return self._store.read_whole(manifest) == (folder / _MANIFEST).read_bytes()
        except Missing:
            return False

    def _remove_checkpoint(self, name: str) -> None:
        folder = f"{self._address}/{_CHECKPOINTS}/{name}"
        found = sorted(self._store.listed(folder), key=lambda one: not one.endswith(_MANIFEST))
        for address in found:
            self._store.remove(address)
        self._there.discard(name)


def _facts(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _files_here(folder: Path) -> Iterator[str]:
    """What is not in checkpoints and not hidden, the identity first and the configuration after it."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "."]
        if Path(root) == folder:
            folders[:] = [name for name in folders if name != _CHECKPOINTS]
        found += [
            (Path(root) / name).relative_to(folder).as_posix()
            for name in names
            if name[0] != "." and not (Path(root) / name).is_symlink()
        ]
    first = {IDENTITY: 0, "config.toml": 1}
    yield from sorted(found, key=lambda name: (first.get(name, 2), name))


def files_there(address: str, store: Store) -> list[str]:
    """All file names of a mirror, relative to it, without hidden ones.

    InputError: there are far too many, or a name leads out of the folder.
    """
    found: list[str] = []
    waiting = [address]
    while waiting:
        for one in store.listed(waiting.pop()):
            if one.endswith("/"):
                waiting.append(one.rstrip("/"))
            else:
                found.append(one.removeprefix(f"{address}/"))
            if len(found) + len(waiting) > _MOST_FILES:
                raise InputError(f"{address} holds more files than any run")
    if any(map(leads_elsewhere, found)):
        raise InputError(f"{address} holds a file with a name that leads elsewhere")
    return sorted(name for name in found if not any(part[0] == "." for part in name.split("/")))


def leads_elsewhere(name: str) -> bool:
    """Whether the name of a file may lead out of its folder."""
    return any(part in ("", ".", "..") for part in name.split("/"))


def _step_folders_there(address: str, store: Store) -> set[str]:
    """The names of the checkpoints of a mirror, whole or not."""
    try:
        folders = store.listed(f"{address}/{_CHECKPOINTS}")
    except Missing:
        return set()
    names = (one.rstrip("/").rpartition("/")[2] for one in folders if one.endswith("/"))
    return {name for name in names if _STEP.fullmatch(name)}


def _steps_there(address: str, store: Store) -> set[str]:
    """The names of the checkpoints of a mirror that are whole."""
    return {
        name
        for name in _step_folders_there(address, store)
        if any(
            one.endswith(f"/{_MANIFEST}")
            for one in store.listed(f"{address}/{_CHECKPOINTS}/{name}")
        )
    }


def _steps_here(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, by rising step."""
    try:
        paths = list((folder / _CHECKPOINTS).iterdir())
    except FileNotFoundError:
        return []
    return sorted(
        (path for path in paths if _STEP.fullmatch(path.name)), key=lambda path: _order(path.name)
    )


def _identity_here(folder: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return _identity_of((folder / IDENTITY).read_bytes(), str(folder / IDENTITY))
    return None


def _identity_there(address: str, store: Store) -> str | None:
    try:
        return _identity_of(store.read_whole(f"{address}/{IDENTITY}"), f"{address}/{IDENTITY}")
    except Missing:
        return None


def _identity_of(data: bytes, name: str) -> str:
    try:
        facts = json.loads(data, object_pairs_hook=json_object)
        run = facts["run"]
        if isinstance(run, str) and run:
            return run
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise InputError(f"{name} is damaged\nName another --mirror")


def _order(name: str) -> tuple[int, str]:
    return len(name), name


@contextlib.contextmanager
def alone(folder: Path, *, why: str) -> Iterator[None]:
    """Keep other processes from copying to or from the folder; `why` is said while waiting."""
    with (folder / ".mirror").open("ab") as file:
        with contextlib.suppress(ImportError):  # Windows
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(why)
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """The process that copies: `fetch` answers with a line of JSON, `follow` ends with standard input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("fetch", "follow"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("address")
    parser.add_argument("--fresh", action="store_true")
    parser.add_argument("--is-copy", action="store_true")
    arguments = parser.parse_args()
    store = Store()
    if arguments.what == "follow":
        with alone(arguments.folder, why="mirror: the upload of the training before is waited for"):
            return 0 if _Follower(arguments.folder, arguments.address, store).follow() else 1
    answer: Mapping[str, str | None]
    try:
        how = {"fresh": arguments.fresh, "is_copy": arguments.is_copy}
        answer = {"said": _fetched(arguments.folder, arguments.address, store, **how)}
    except InputError as error:
        answer = {"refused": str(error)}
    except OSError as error:
        answer = {"refused": f"{error.filename or arguments.folder}: {error.strerror or error}"}
    print_text(json.dumps(answer))
    return 0
