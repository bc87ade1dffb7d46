"""Checkpoints that are written whole or not at all, and verified whenever they are read.

检查点：要么完整写入，要么完全不写；每次读取都校验。

Source: original; the order of writes and syncs follows Pillai et al., "All File Systems Are Not Created
Equal: On the Complexity of Crafting Crash-Consistent Applications", OSDI 2014.
Functions that touch the disk take its operations as `disk=`, so that a test can replace them.
Not for tensors sharded over many ranks (`torch.distributed.checkpoint` writes those in parallel),
and not for a file system without rename and fsync, such as an object store.
"""

import errno
import functools
import hashlib
import io
import json
import os
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

MANIFEST = "manifest.json"
_FORMAT = 1
_STEP = re.compile(r"step-([0-9]+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_LEFTOVER = re.compile(r"\..+\.[0-9a-f]{16}\.(tmp|removed)")
_ABANDONED_S = 86_400  # no write takes a day; chosen
_VERIFY_BYTES = 1 << 20  # memory of a verification; chosen, untested
_MOST_MANIFEST_CHUNKS = 64  # of this size: a million files
_READ_BYTES = 1 << 30  # a file up to this size is read by one call, without joining or copying
# Errors of a damaged checkpoint (bad sectors, a broken file tree). Any other OSError (no permission,
# too many open files) says nothing about the checkpoint and is passed on to the caller.
_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EIO} | {
    getattr(errno, name, errno.EIO)
    for name in ("EBADMSG", "EUCLEAN")  # not on every system
}


class CheckpointDamaged(ValueError):
    """A checkpoint differs from what was saved: in `folder`, file `name`, `what` is wrong."""

    def __init__(self, folder: Path, name: str, what: str) -> None:
        super().__init__(folder, name, what)
        self.folder, self.name, self.what = folder, name, what

    def __str__(self) -> str:
        return f"checkpoint {self.folder} is damaged: {self.name} {self.what}"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: `meta` as it was saved, and the content of each file by name."""

    folder: Path
    meta: dict[str, Any]
    files: dict[str, bytes]


class Disk:
    """Every file operation of this module, one system call per method, so that tests can fail each.

    Python repeats an interrupted call (PEP 475); the caller handles a short write.

    Example:
        >>> class FullDisk(Disk):
        ...     def write(self, file: int, data: memoryview) -> int:
        ...         raise OSError(errno.ENOSPC, "No space left on device")
        >>> try:
        ...     write_file(Path("config.toml"), b"seed = 1", disk=FullDisk())
        ... except OSError as error:
        ...     print(error.strerror, Path("config.toml").exists())
        No space left on device False
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Make a new file and open it for writing; an existing file is an error."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        return os.open(path, flags, 0o666)

    def write(self, file: int, data: memoryview) -> int:
        """Write the start of `data`, and return how many bytes."""
        return os.write(file, data)

    def sync(self, file: int) -> None:
        """Wait until the file's content is on the disk."""
        os.fsync(file)

    def open(self, path: Path) -> int:
        """Open a file for reading; a pipe in its place is not waited for."""
        flags = getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        return os.open(path, os.O_RDONLY | flags)

    def read(self, file: int, size: int) -> bytes:
        """Read at most `size` bytes; none at the end of the file."""
        return os.read(file, size)

    def close(self, file: int) -> None:
        """Close a file."""
        os.close(file)

    def sync_folder(self, path: Path) -> None:
        """Wait until the folder's list of names is on the disk."""
        if os.name == "nt":
            return  # Windows cannot open a folder as a file
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            os.close(file)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or folder; an existing file `target` is replaced."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def names(self, path: Path) -> list[str]:
        """The names in a folder, in any order."""
        return [entry.name for entry in path.iterdir()]

    def is_abandoned(self, path: Path) -> bool:
        """Whether nothing was written there for a day."""
        return time.time() - path.lstat().st_mtime > _ABANDONED_S


def save_checkpoint(
    folder: Path, files: Mapping[str, bytes], *, meta: Mapping[str, Any], disk: Disk | None = None
) -> None:
    """Save files as one checkpoint; once this returns, it survives a power failure.

    Args:
        folder: to make, such as `checkpoints/step-00001200`, with its parents.
        files: content by name; names have letters, digits, '_', '-' and '.'.
        meta: what JSON stores exactly: string keys, lists rather than tuples, finite numbers.

    Raises:
        FileExistsError: `folder` exists; a checkpoint is never overwritten.
        OSError: the disk is full or failing; what was written is removed as far as the disk allows, and older
            checkpoints are unchanged.
        TypeError, ValueError: a file's name or content, or `meta`, cannot be saved.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     folder = Path(root, "step-00000007")
        ...     save_checkpoint(folder, {"note.txt": b"hello"}, meta={"step": 7})
        ...     read_checkpoint(folder).files
        {'note.txt': b'hello'}
    """
    for name, data in files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ValueError(f"a file's name is of letters, digits, '_', '-', '.', got {name!r}")
        if not isinstance(data, bytes):
            raise TypeError(f"the content of {name} must be bytes, got {type(data).__name__}")
    _manifest_bytes({}, meta)  # refused before anything is written
    writer = CheckpointWriter(folder, disk=disk)
    try:
        writer.start()
        for name, data in files.items():
            writer.write(name, data)
        writer.finish(meta)
    except BaseException:
        writer.undo()
        raise


class CheckpointWriter:
    """Writes one checkpoint whose files come one by one or from several processes.

    Args:
        folder: as for `save_checkpoint`.
        temporary: what `start` returned in another process, for a process that only writes files.

    Attributes:
        entries: size and SHA-256 by name of file, for the manifest.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     writer = CheckpointWriter(Path(root, "step-00000007"))
        ...     _ = writer.start()
        ...     writer.write("note.txt", b"hello")
        ...     writer.finish({"step": 7})
        ...     verify_checkpoint(Path(root, "step-00000007"))
        {'step': 7}
    """

    def __init__(
        self, folder: Path, *, temporary: Path | None = None, disk: Disk | None = None
    ) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self._folder = folder
        self._temporary = temporary
        self._disk = disk or Disk()
        self._renamed = False

    def start(self) -> Path:
        """Make the hidden folder that will become the checkpoint, and return its path."""
        folder, disk = self._folder, self._disk
        _make_folders(disk, folder.parent)
        if folder.name in disk.names(folder.parent):
            raise FileExistsError(errno.EEXIST, "a checkpoint is never overwritten", str(folder))
        temporary = _hidden_path(folder, "tmp")
        disk.make_folder(temporary)
        self._temporary = temporary
        return temporary

    def write(self, name: str, data: bytes) -> None:
        """Write a file; its content is then on the disk, its name perhaps not yet."""
        assert self._temporary is not None
        _write_synced(self._disk, self._temporary / name, data, self._folder / name)
        self.entries[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def read_back(self) -> None:
        """Verify the files written so far; raises `CheckpointDamaged`."""
        assert self._temporary is not None
        _verify(self._disk, self._temporary, self.entries)

    def finish(self, meta: Mapping[str, Any]) -> None:
        """Write the manifest of all entries, and rename the folder to its final name."""
        assert self._temporary is not None
        manifest = _manifest_bytes(self.entries, meta)
        _write_synced(self._disk, self._temporary / MANIFEST, manifest, self._folder / MANIFEST)
        # The names must be on the disk before the rename is, and the rename before we return.
        self._disk.sync_folder(self._temporary)
        self._disk.rename(self._temporary, self._folder)
        self._renamed = True
        self._disk.sync_folder(self._folder.parent)

    def undo(self) -> None:
        """Remove everything that was written, as far as the disk allows."""
        if self._temporary is not None:
            with suppress(OSError):  # the first error is the one to report
                if self._renamed:
                    self._disk.rename(self._folder, self._temporary)
                _remove_tree(self._disk, self._temporary)


def read_checkpoint(
    folder: Path, *, only: Callable[[str], bool] | None = None, disk: Disk | None = None
) -> Checkpoint:
    """Read a checkpoint and verify it; the returned bytes are the verified ones.

    Args:
        folder: files that its manifest does not name are not read.
        only: by name, which files are read and verified; by default all.

    Raises:
        CheckpointDamaged: a file is missing or differs from what was saved.
        OSError: another failure, such as permissions.

    Example:
        >>> try:
        ...     read_checkpoint(Path("step-00000099"))
        ... except CheckpointDamaged as error:
        ...     print(error)
        checkpoint step-00000099 is damaged: manifest.json is missing
    """
    disk = disk or Disk()
    meta, entries = _read_manifest(disk, folder)
    files = {}
    for name, entry in entries.items():
        if only is None or only(name):
            chunk_bytes = min(entry["size"] + 1, _READ_BYTES)
            files[name] = b"".join(_verified_chunks(disk, folder, name, entry, chunk_bytes))
    return Checkpoint(folder, meta, files)


def verify_checkpoint(folder: Path, *, disk: Disk | None = None) -> dict[str, Any]:
    """Verify a checkpoint as `read_checkpoint` does, with the same errors, but in little memory.

    Returns:
        Its `meta`.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     save_checkpoint(Path(root, "step-00000007"), {}, meta={"step": 7})
        ...     verify_checkpoint(Path(root, "step-00000007"))
        {'step': 7}
    """
    disk = disk or Disk()
    meta, entries = _read_manifest(disk, folder)
    _verify(disk, folder, entries)
    return meta


def _verify(disk: Disk, folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entry in entries.items():
        for _ in _verified_chunks(disk, folder, name, entry, _VERIFY_BYTES):
            pass


def checkpoint_folders(root: Path, *, disk: Disk | None = None) -> list[Path]:
    """List the checkpoints in a folder, whole or damaged: all names of `step-` and a number.

    Args:
        root: need not exist.

    Returns:
        Paths, by rising step.

    Example:
        >>> checkpoint_folders(Path("no-such-folder"))
        []
    """
    names = [name for name in _names(disk or Disk(), root) if _STEP.fullmatch(name)]
    return [root / name for name in sorted(names, key=lambda name: (_step(name), name))]


def latest_checkpoint(
    root: Path, *, disk: Disk | None = None
) -> tuple[Checkpoint | None, list[CheckpointDamaged]]:
    """Read the checkpoint with the highest step that verifies, and list the damaged ones after it.

    Args:
        root: folder of the checkpoints; need not exist.

    Returns:
        The checkpoint, or None, and a one-line error for each damaged checkpoint with a higher step.

    Raises:
        OSError: a failure other than damage, such as permissions.

    Example:
        >>> latest_checkpoint(Path("no-such-folder"))
        (None, [])
    """
    damaged: list[CheckpointDamaged] = []
    for folder in reversed(checkpoint_folders(root, disk=disk)):
        try:
            return read_checkpoint(folder, disk=disk), damaged
        except CheckpointDamaged as error:
            damaged.append(error.with_traceback(None))  # its frames hold the bytes read so far
    return None, damaged


def set_aside(folder: Path, *, disk: Disk | None = None) -> Path:
    """Rename a damaged checkpoint, so that its step can be saved again without deleting anything.

    Returns:
        Its new path: `step-00001200.damaged`, or `.damaged-2` and so on.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     save_checkpoint(Path(root, "step-00000007"), {}, meta={})
        ...     set_aside(Path(root, "step-00000007")).name
        'step-00000007.damaged'
    """
    disk = disk or Disk()
    taken = disk.names(folder.parent)
    name = f"{folder.name}.damaged"
    if name in taken:
        name = next(f"{name}-{n}" for n in count(2) if f"{name}-{n}" not in taken)
    disk.rename(folder, folder.with_name(name))
    disk.sync_folder(folder.parent)
    return folder.with_name(name)


def remove_leftovers(root: Path, *, disk: Disk | None = None) -> list[Path]:
    """Remove the leftovers of killed saves, removals and `write_file` calls; nobody else may be writing.

    Args:
        root: folder of the checkpoints; need not exist.

    Returns:
        The removed paths.

    Example:
        >>> remove_leftovers(Path("no-such-folder"))
        []
    """
    disk = disk or Disk()
    leftovers = [root / name for name in sorted(_names(disk, root)) if _LEFTOVER.fullmatch(name)]
    for path in leftovers:
        _remove_tree(disk, path)
    return leftovers


def prune_checkpoints(
    root: Path, *, keep_last: int, keep: Collection[str] = (), disk: Disk | None = None
) -> list[Path]:
    """Remove old checkpoints, but keep the newest `keep_last` that verify now.

    A damaged checkpoint does not count, and is removed only if it is older than all that are kept. A killed
    removal leaves hidden names for `remove_leftovers`, never a damaged checkpoint.

    Args:
        keep_last: at least 1.
        keep: names to keep besides, such as the best, `step-00001200`.

    Returns:
        The removed paths. With nothing to remove, no checkpoint is read.

    Raises:
        ValueError: `keep_last` is below 1, or `keep` has a name that is not a checkpoint's.
        OSError: the disk fails; the checkpoints to keep are unchanged.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     for step in range(4):
        ...         save_checkpoint(Path(root, f"step-{step:08d}"), {}, meta={})
        ...     removed = prune_checkpoints(Path(root), keep_last=2, keep=["step-00000000"])
        ...     [folder.name for folder in removed]
        ['step-00000001']
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}")
    disk = disk or Disk()
    keep_steps = {_step(name) for name in keep}
    older = checkpoint_folders(root, disk=disk)
    if all(_step(folder.name) in keep_steps for folder in older[:-keep_last]):
        return []
    num_verified = 0
    while older and num_verified < keep_last:
        with suppress(CheckpointDamaged):
            verify_checkpoint(older.pop(), disk=disk)
            num_verified += 1
    removed = [folder for folder in older if _step(folder.name) not in keep_steps]
    hidden = [_hidden_path(folder, "removed") for folder in removed]
    for folder, path in zip(removed, hidden, strict=True):
        disk.rename(folder, path)
    disk.sync_folder(root)  # else a crash could restore a name whose files are gone
    for path in hidden:
        _remove_tree(disk, path)
    return removed


def write_file(path: Path, data: bytes, *, disk: Disk | None = None) -> None:
    """Write a file atomically: whenever the machine dies, the old or the new content is whole.

    Args:
        path: missing folders are made.

    Raises:
        OSError: the disk is full or failing.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     write_file(Path(root, "config.toml"), b"seed = 1")
        ...     Path(root, "config.toml").read_bytes()
        b'seed = 1'
    """
    disk = disk or Disk()
    with replacing(path, disk=disk) as temporary:
        _write_synced(disk, temporary, data, path)


@contextmanager
def replacing(path: Path, *, disk: Disk) -> Iterator[Path]:
    """`write_file` for content that is not in memory: the block writes and syncs the hidden path given.

    It may make a folder there. What killed writes of `path` have left is removed a day later.

    Raises:
        OSError: the disk fails; the error names `path` instead of the hidden one.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as root:
        ...     with replacing(Path(root, "a.txt"), disk=Disk()) as hidden:
        ...         _ = hidden.write_text("abc")  # and os.fsync
        ...     Path(root, "a.txt").read_text()
        'abc'
    """
    _make_folders(disk, path.parent)
    temporary = _hidden_path(path, "tmp")
    try:
        yield temporary
        disk.rename(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            _remove_tree(disk, temporary)
        if isinstance(error, OSError):
            hidden = temporary if error.filename is None else error.filename
            error.filename = str(hidden).replace(str(temporary), str(path))
        raise
    disk.sync_folder(path.parent)
    _remove_abandoned(disk, path)


def to_bytes(state: Mapping[str, Any]) -> bytes:
    """Serialize with `torch.save`, but refuse at once what `weights_only=True` would refuse to read.

    Args:
        state: of dict, OrderedDict, Counter, list, tuple, str, bytes, int, float, bool, None,
            dtype, device, and dense tensors of any shape, dtype and device.

    Raises:
        TypeError: any other value; the message says where: `optimizer.param_groups[0].lr`.

    Example:
        >>> from_bytes(to_bytes({"step": 7, "weight": torch.ones(2)}))
        {'step': 7, 'weight': tensor([1., 1.])}
    """
    plain = dict(state)
    _check_readable(plain, "")
    file = io.BytesIO()
    torch.save(plain, file)
    return file.getvalue()


def from_bytes(data: bytes) -> dict[str, Any]:
    """Read what `to_bytes` or `torch.save` wrote, all tensors on the CPU; code in the file never runs.

    Raises:
        pickle.UnpicklingError: objects that weights_only does not allow.
        TypeError: anything but a dict.

    Example:
        >>> from_bytes(to_bytes({"weight": torch.ones(2)}))["weight"].device
        device(type='cpu')
    """
    state = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    if not isinstance(state, dict):
        raise TypeError(f"a state must be a dict, the file holds a {type(state).__name__}")
    return state


def _manifest_bytes(entries: Mapping[str, Mapping[str, Any]], meta: Mapping[str, Any]) -> bytes:
    """The content of manifest.json, which ends with its own SHA-256."""
    manifest = {"format": _FORMAT, "meta": dict(meta), "files": dict(entries)}
    text = json.dumps(manifest, indent=2, allow_nan=False)
    if json.loads(text) != manifest:
        raise TypeError("meta must have only string keys, and lists in place of tuples")
    return _sealed(text.removesuffix("\n}").encode() + b',\n  "sha256": "')


def _sealed(head: bytes) -> bytes:
    # The hash is over the bytes: JSON has many spellings of one value, and each flipped bit must show.
    return head + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


def _read_manifest(disk: Disk, folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The verified manifest: meta, and size and SHA-256 of each file by name."""
    chunks = _chunks(disk, folder, MANIFEST, _VERIFY_BYTES)
    data = b"".join(islice(chunks, _MOST_MANIFEST_CHUNKS))
    if data != _sealed(data[: -len(_sealed(b""))]):
        raise CheckpointDamaged(folder, MANIFEST, "is not what was saved (its own SHA-256 differs)")
    try:
        manifest = json.loads(data)
        version, meta, files = (manifest[name] for name in ("format", "meta", "files"))
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # sealed by somebody else
        raise CheckpointDamaged(folder, MANIFEST, "is no list of files") from error
    if version != _FORMAT:
        what = f"has format {version!r}, this program reads {_FORMAT}"
        raise CheckpointDamaged(folder, MANIFEST, what)
    if not isinstance(meta, dict) or not isinstance(files, dict):
        raise CheckpointDamaged(folder, MANIFEST, "is no list of files")
    for name, entry in files.items():
        if not _is_entry(entry):
            raise CheckpointDamaged(folder, MANIFEST, f"has no size and SHA-256 of {name!r}")
        if not _FILE_NAME.fullmatch(name):  # anybody can write a matching checksum for any path
            raise CheckpointDamaged(folder, MANIFEST, f"lists a file that may not be: {name!r}")
    return meta, files


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
        return False
    size = entry.get("size")
    return type(size) is int and size >= 0


def _verified_chunks(
    disk: Disk, folder: Path, name: str, entry: Mapping[str, Any], chunk_bytes: int
) -> Iterator[bytes]:
    """The content of a file in chunks; verified once the last chunk was taken."""
    size = entry["size"]
    digest = hashlib.sha256()
    length = 0
    for chunk in _chunks(disk, folder, name, chunk_bytes):
        digest.update(chunk)
        length += len(chunk)
        if length > size:
            raise CheckpointDamaged(folder, name, f"is longer than the {size} bytes saved")
        yield chunk
    if length < size:
        raise CheckpointDamaged(folder, name, f"has {length} of the {size} bytes saved")
    if digest.hexdigest() != entry["sha256"]:
        raise CheckpointDamaged(folder, name, "is not what was saved (its SHA-256 differs)")


def _chunks(disk: Disk, folder: Path, name: str, chunk_bytes: int) -> Iterator[bytes]:
    try:
        file = disk.open(folder / name)
        try:
            while chunk := disk.read(file, chunk_bytes):
                yield chunk
        finally:
            disk.close(file)
    except FileNotFoundError:
        raise CheckpointDamaged(folder, name, "is missing") from None
    except OSError as error:
        if error.errno in _DAMAGE:
            raise CheckpointDamaged(folder, name, f"cannot be read ({error.strerror})") from error
        error.filename = str(folder / name)
        raise


def _write_synced(disk: Disk, path: Path, data: bytes, final: Path) -> None:
    """Write a new file and sync its content, not its name. Errors name the `final` path."""
    # Through one descriptor: a second one may not report a failed write-back.
    try:
        file = disk.create(path)
        try:
            left = memoryview(data)
            while left:
                left = left[disk.write(file, left) :]
            disk.sync(file)
        finally:
            disk.close(file)
    except OSError as error:
        error.filename = str(final)  # operations on a descriptor set no file name
        raise


def _make_folders(disk: Disk, folder: Path) -> None:
    """Make a folder and its parents, and sync each name."""
    try:
        disk.make_folder(folder)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        _make_folders(disk, folder.parent)
        _make_folders(disk, folder)
    except FileExistsError:
        _sync_name(disk, folder)  # the process that made it may have been killed before its sync
    else:
        _sync_name(disk, folder.parent)  # the same holds for the parent
        _sync_name(disk, folder)


def _sync_name(disk: Disk, path: Path) -> None:
    try:
        disk.sync_folder(path.parent)
    except OSError as error:
        # A folder that we may not open, or an automount that cannot sync, existed before us.
        if error.errno not in (errno.EACCES, errno.EINVAL):
            raise


def _names(disk: Disk, root: Path) -> list[str]:
    try:
        return disk.names(root)
    except FileNotFoundError:
        return []


def _remove_tree(disk: Disk, path: Path) -> None:
    """Remove a file, or a folder with its files."""
    # `remove` comes first, so that a link is never followed.
    try:
        disk.remove(path)
    except (IsADirectoryError, PermissionError):  # macOS and Windows raise the latter for a folder
        for name in disk.names(path):
            _remove_tree(disk, path / name)
        disk.remove_folder(path)


def _remove_abandoned(disk: Disk, path: Path) -> None:
    """Remove what killed writes of this path have left, and nothing that somebody may be writing."""
    for name in _left_in(path.parent.absolute()):
        is_ours = re.fullmatch(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp", name)
        with suppress(OSError):  # what was to be written is there
            if is_ours and disk.is_abandoned(path.with_name(name)):
                _remove_tree(disk, path.with_name(name))


@functools.lru_cache(maxsize=64)
def _left_in(folder: Path) -> tuple[str, ...]:
    """Names of unfinished files, listed once for each process: the folder may hold a million others."""
    try:
        return tuple(path.name for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    except OSError:
        return ()


def _hidden_path(path: Path, kind: str) -> Path:
    """An unused hidden name beside `path`, for a file being written ('tmp') or removed."""
    # A process id would not do: in a container it is the same after every restart.
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def _step(name: str) -> int:
    match = _STEP.fullmatch(name)
    if match is None:
        raise ValueError(f"a checkpoint's name is 'step-' and a number, got {name!r}")
    return int(match[1])


def _check_readable(value: Any, location: str) -> None:
    kind = type(value)  # exactly: a subclass such as numpy.float64 is pickled as itself
    if kind in (dict, OrderedDict, Counter):
        for key, item in value.items():
            _check_readable(key, f"{location} (a key)")
            _check_readable(item, f"{location}.{key}" if location else str(key))
    elif kind in (list, tuple, torch.Size):
        for index, item in enumerate(value):
            _check_readable(item, f"{location}[{index}]")
    elif kind in (Tensor, torch.nn.Parameter):
        if value.layout != torch.strided or value.is_meta:
            _refuse(location, f"a {value.layout} tensor on {value.device}")
    elif kind not in (str, bytes, int, float, bool, type(None), torch.dtype, torch.device):
        _refuse(location, f"of type {kind.__module__}.{kind.__qualname__}")
    elif (kind is bytes and not value) or (kind is int and value.bit_length() > 2039):
        _refuse(location, "empty bytes or an int of over 2039 bits")  # opcodes that torch lacks
    for name, item in getattr(value, "__dict__", {}).items():  # pickled with the tensor or dict
        _check_readable(item, f"{location}.{name}")


def _refuse(location: str, what: str) -> NoReturn:
    raise TypeError(
        f"{location} is {what}, which torch.load(weights_only=True) cannot give back: "
        "make it a plain number, string, list, dict or dense tensor"
    )
