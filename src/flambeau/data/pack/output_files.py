"""The files of `flambeau pack`: a hidden folder for unfinished ones, final names, and the manifest."""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flambeau.data.pack.shard_indexes import shard_index_files
from flambeau.data.pack.shard_plan import Unit
from flambeau.data.sources.class_names_file import class_names_path
from flambeau.data.sources.escaped_names import CLASS_NAMES, class_names_file, folder_names
from flambeau.errors import DISK_ERRNOS, InputError, why_no_json
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk
from flambeau.terminal import say

MANIFEST = ".pack.json"  # appended to the name of DST
_STAGING = ".packing"
_PLAN = "plan.json"
_FACTS = ".unit.json"
_LOCK = "lock"
_UNIT = {"files": list, "crc32": str, "bad": list}
_START_AGAIN = "Give --fresh to start again"
_MAX_FACTS = 1 << 28  # bytes; the checksums of 30 million images
_RESERVED = 1 << 20  # bytes that a full file system may still report as free


class Packed(NamedTuple):
    """Paths or addresses of the files, a line per image left out; `already`: made before."""

    files: Sequence[Path | str]
    images: int
    bad: Sequence[str]
    already: bool
    remarks: Sequence[str] = ()


class PackFiles:
    """The files of one DST, unfinished and finished; `config` decides their content."""

    def __init__(
        self,
        dst: Path,
        kind: str,
        classes: Sequence[str],
        units: Sequence[Unit],
        config: Mapping[str, Any],
    ) -> None:
        self.dst, self._kind, self.classes, self._units = dst, kind, classes, units
        self._config = json.loads(json.dumps(config))
        self._staging = hidden_folder(dst)
        self._manifest = dst.with_name(dst.name + MANIFEST)
        self.finals = list(dict.fromkeys(map(self._final, units)))

    def finished(self) -> Packed | None:
        """The result of an earlier run of the command, if finished."""
        facts = read_manifest(self._manifest) if self._manifest.exists() else None
        files = [] if facts is None else [self.dst.with_name(name) for name in facts["files"]]
        if facts is None or not any(path.exists() for path in files):
            if not (self._staging / _PLAN).exists():
                _refuse_existing(self.finals)
            return None
        self.check_same(facts["config"], f"{self.dst} is there")
        for path in files:
            if not path.exists():
                raise InputError(f"{path} is missing\nMake it again with --fresh")
        remove_folder(self._staging)
        return Packed(files, facts["images"], facts["bad_images"], already=True)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Lock the hidden folder against a second process that packs the same DST."""
        return locked_folder(self._staging, self.dst, plan=_PLAN)

    def set_aside(self) -> None:
        """Remove unfinished files, and move finished ones into a folder NAME.old-N."""
        old = [self._manifest, *self.finals, *self._beside()]
        for path in self._staging.iterdir():
            if (path / _FACTS).exists():  # the process was killed while files got their final names
                with contextlib.suppress(InputError):
                    names = _read_facts(path / _FACTS, _UNIT, "")["files"]
                    old += map(self.dst.with_name, names if self._kind != "folder" else ())
        _remove_all_but_lock(self._staging)
        if self._manifest.exists():
            with contextlib.suppress(InputError):
                facts = read_manifest(self._manifest)
                old += map(self.dst.with_name, (*facts["files"], *facts["beside"]))
        old += shard_index_files(old)
        old = [path for path in dict.fromkeys(old) if path.exists()]
        number = 1
        while (aside := self.dst.with_name(f"{self.dst.name}.old-{number}")).exists():
            number += 1
        if old:
            aside.mkdir()
            Disk().sync_folder(aside.parent)  # else a power cut could lose what is moved into it
        for path in old:
            path.rename(aside / path.name)
        if old:  # before new files take their names
            Disk().sync_folder(aside)
            Disk().sync_folder(aside.parent)

    def stored_plan(self) -> Any:
        """The value given to `store_plan`; None if nothing has begun."""
        plan = self._staging / _PLAN
        if not plan.exists():
            self.class_names_path()  # raises InputError if they cannot be written
            return None
        stored = _read_facts(plan, {"config": dict, "found": list}, _START_AGAIN)
        if len(stored["found"]) not in (0, 3):
            raise InputError(f"{plan} is damaged: {stored['found']!r:.60}\n{_START_AGAIN}")
        self.check_same(stored["config"], f"an unfinished {self.dst.name} is there")
        return stored["found"]

    def store_plan(self, layout: Any) -> None:
        """Keep what was determined before the first image, for a later start."""
        plan = {"config": self._config, "found": layout}
        write_whole(self._staging / _PLAN, json.dumps(plan))

    def unit_facts(self, number: int) -> dict[str, Any] | None:
        """The facts of a unit that is complete; else None."""
        facts = self.unit_folder(number) / _FACTS
        return _read_facts(facts, _UNIT, _START_AGAIN) if facts.exists() else None

    @contextlib.contextmanager
    def unit(self, number: int, facts: dict[str, Any]) -> Iterator[Path]:
        """A folder for a unit, complete when the context ends, which also writes `facts`."""
        folder = self._staging / f"{number:05}.tmp"
        remove_folder(folder)
        folder.mkdir()
        try:
            yield folder
            sync_below(folder, at_once=self._kind == "folder")
            facts["files"] = sorted(path.name for path in folder.iterdir())
            write_whole(folder / _FACTS, json.dumps(facts))
            folder.rename(self.unit_folder(number))
            Disk().sync_folder(self._staging)
        except BaseException:
            with contextlib.suppress(OSError):
                remove_folder(folder)
            raise

    def publish(self, bad: Sequence[str]) -> Packed:
        """Give all files their final names, unless done before a kill."""
        tree = self._staging / "tree"
        if self._kind == "folder" and not self.dst.exists():
            self._make_class_folders(tree)
        if (names_path := self.class_names_path()) is not None:
            write_classes(names_path, self.classes)  # first: data without it have other classes
        for number, unit in enumerate(self._units):
            if self._kind == "folder":
                _move_tree(self.unit_folder(number), tree / unit.file)
            else:
                self._move(self.unit_folder(number))
        if tree.exists():
            _refuse_existing([self.dst])
            sync_below(tree, at_once=True)
            tree.rename(self.dst)
        Disk().sync_folder(self.dst.parent)
        manifest = self.manifest(bad)
        write_whole(self._manifest, json.dumps(manifest, ensure_ascii=False))
        self.remove()
        return Packed(self.finals, manifest["images"], bad, already=False)

    def manifest(self, bad: Sequence[str]) -> dict[str, Any]:
        """The content of DST.pack.json, when all units are complete."""
        files: dict[str, dict[str, Any]] = {}
        beside: set[str] = set()
        for number, unit in enumerate(self._units):
            facts = self.unit_facts(number)
            assert facts is not None
            entry = files.setdefault(self._final(unit).name, {"images": 0, "crc32": ""})
            entry["images"] += len(facts["crc32"]) // 8
            entry["crc32"] += facts["crc32"]
            if self._kind != "folder":
                beside.update(facts["files"])
        return {
            "config": self._config,
            "classes": list(self.classes),
            "images": sum(entry["images"] for entry in files.values()),
            "bad_images": list(bad),
            "beside": sorted(beside - files.keys()),
            "files": files,
        }

    def remove(self) -> None:
        """Remove what is unfinished; the folder itself goes with its lock."""
        _remove_all_but_lock(self._staging)

    def _make_class_folders(self, tree: Path) -> None:
        """On the disk before anything is moved into them, and also for classes without images."""
        for part in {unit.file for unit in self._units}:
            for name in folder_names(self.classes):
                (tree / part / name).mkdir(parents=True, exist_ok=True)
            if (names := class_names_file(self.classes)) is not None:
                write_whole(tree / part / CLASS_NAMES, names)
        sync_below(tree, at_once=True)
        Disk().sync_folder(tree.parent)

    def _beside(self) -> list[Path]:
        """The files without which the data cannot be read; the manifest lists them too, if it is there."""
        if self._kind == "rec":
            return [path.with_suffix(".idx") for path in self.finals]
        if self._kind == "npy":
            return [path.with_name(f"{path.stem}_labels.npy") for path in self.finals]
        return []

    def _final(self, unit: Unit) -> Path:
        return self.dst if self._kind == "folder" else self.dst.with_name(unit.file)

    def unit_folder(self, number: int) -> Path:
        return self._staging / f"{number:05}"

    def _move(self, folder: Path) -> None:
        # Files beside the data go first: without them the data would lack their keys.
        paths = [path for path in folder.iterdir() if path.name != _FACTS]
        paths.sort(key=lambda path: (path.suffix != ".idx", path.name))
        _refuse_existing(self.dst.with_name(path.name) for path in paths)
        for path in paths:
            path.rename(self.dst.with_name(path.name))

    def check_same(self, then: Mapping[str, Any], what: str) -> None:
        now = self._config
        then = {"content": now.get("content"), **then}  # version 0.1 did not store it
        changed = next((key for key in now if then.get(key) != now[key]), None)
        if changed is None:
            return
        how = f"with {changed} {then.get(changed)}, not {now[changed]}"
        if changed in ("data", "content"):
            how = "of other images, or of a source that has changed since"
        raise InputError(
            f"{what}, made {how}\n"
            "Give the same command to continue it, another DST, or --fresh to make it again"
        )

    def class_names_path(self) -> Path | None:
        if self._kind == "folder":
            return None
        return class_names_path(self.dst, self.classes)


def hidden_folder(dst: Path) -> Path:
    return dst.with_name(f".{dst.name}{_STAGING}")


@contextlib.contextmanager
def locked_folder(folder: Path, dst: Path, *, plan: str) -> Iterator[None]:
    """Make a hidden folder, and keep a second process that makes the same DST out of it.

    Without the file `plan` it holds nothing to continue, and is then removed.
    """
    folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as once_closed, (folder / _LOCK).open("w") as file:
        with contextlib.suppress(ImportError):  # Windows: no lock
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InputError(f"another process is packing {dst} now") from error
        try:
            yield
        finally:
            if not (folder / plan).exists():
                _remove_all_but_lock(folder)
                # NFS and FUSE keep an open file in its folder, under another name, until it is closed.
                once_closed.callback(_remove_if_empty, folder)
                if os.name == "nt":  # where an open file cannot be removed
                    once_closed.callback((folder / _LOCK).unlink)
                else:  # before another process can have locked it
                    (folder / _LOCK).unlink()


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # or another process has begun there
            say(
                f"{folder} is empty, and cannot be removed: {(error.strerror or str(error)).lower()}"
            )


def remove_or_say(folder: Path) -> None:
    """Remove a working folder; all is done, so a disk that cannot is no error."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        say(f"{folder} cannot be removed: {(error.strerror or str(error)).lower()}")


@contextlib.contextmanager
def name_disk_errors(dst: Path, folder: Path) -> Iterator[None]:
    """Turn disk errors, also of libraries, into an OSError that names `dst`, not a hidden file."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        number = _errno_of(error, folder)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(dst)) from error


def _errno_of(error: Exception, folder: Path) -> int | None:
    """The disk error behind an exception; None if there is none."""
    number: int | None = getattr(error, "errno", None)
    if number is None:
        number = next((n for n in sorted(DISK_ERRNOS) if os.strerror(n) in str(error)), None)
    if number in (None, errno.EIO) and shutil.disk_usage(folder).free < _RESERVED:
        return errno.ENOSPC
    return number


def read_manifest(path: Path) -> dict[str, Any]:
    """The .pack.json of a packed file; InputError if it is damaged."""
    remedy = "Remove it: it only holds checksums and how the data were made"
    kinds = {
        "config": dict,
        "classes": list,
        "images": int,
        "bad_images": list,
        "beside": list,
        "files": dict,
    }
    facts = _read_facts(path, kinds, remedy)
    for entry in facts["files"].values():
        crcs = entry.get("crc32") if isinstance(entry, dict) else None
        if not isinstance(crcs, str) or not re.fullmatch("(?:[0-9a-f]{8})*", crcs):
            raise InputError(f"{path} is damaged: a checksum is missing\n{remedy}")
    return facts


def _read_facts(path: Path, kinds: Mapping[str, type], remedy: str) -> dict[str, Any]:
    """The content of one of our JSON files; InputError if it is malformed."""
    try:
        if path.stat().st_size > _MAX_FACTS:
            raise ValueError(f"it has more than {_MAX_FACTS} bytes")
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for key, kind in kinds.items():
            if not isinstance(facts.get(key), kind):
                raise ValueError(f"{key!r} is missing, or no {kind.__name__}")
        for name in (*facts.get("files", ()), *facts.get("beside", ())):
            if not isinstance(name, str) or Path(name).name != name or name == "..":
                raise ValueError(f"{name!r:.60} is no name of a file beside it")
    except (ValueError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is damaged: {why_no_json(error)}\n{remedy}") from error
    return facts


def _refuse_existing(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.exists() or path.is_symlink():
            raise InputError(
                f"{path} exists\nName another DST, or give --fresh, which sets aside what is there"
            )


def _move_tree(folder: Path, target: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _FACTS:
            goal = target / path.relative_to(folder)
            goal.parent.mkdir(parents=True, exist_ok=True)
            path.rename(goal)


def write_classes(path: Path, classes: Sequence[str]) -> None:
    """Write the file of class names: one per line, in the order of their numbers."""
    write_whole(path, "".join(f"{name}\n" for name in classes))


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically.

    The temporary file has a fixed name, so that the next try replaces what a kill left behind.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync_file(temporary)
        temporary.replace(path)
        Disk().sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # a failed write has none
        raise


def sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def sync_below(folder: Path, *, at_once: bool = False) -> None:
    """Wait until all files below a folder are on the disk, and their names.

    `at_once`: for thousands of small files. 1,000 of 8 KB took 0.02 s, and 1.5 s one by one (ext4).
    """
    if at_once and _sync_file_system(folder):
        return
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            Disk().sync_folder(path)
        else:
            sync_file(path)


def _sync_file_system(folder: Path) -> bool:
    """Sync all of the file system that a folder lies in; False where there is no such call."""
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None) if os.name != "nt" else None
    if syncfs is None:
        return False
    opened = os.open(folder, os.O_RDONLY)
    try:
        if syncfs(opened) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(opened)
    return True


def remove_folder(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _remove_all_but_lock(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()
