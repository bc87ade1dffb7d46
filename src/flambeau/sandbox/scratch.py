"""Folders for the writes of a view's processes: locked while in use, and removed even if their maker died."""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from flambeau.sandbox.mount_syscalls import mount_of, read_mounts
from flambeau.sandbox.trial_processes import end_processes

_PREFIX = "flambeau-trials-"
_UNLOCKED = "flambeau-new-trials-"
_LOCKED_BY_THEN_S = 3600.0  # it takes a moment, unless the process is stopped
_LOCK = "in_use"


class Scratch:
    """Empty folders on up to two locations of the disk, removed by `close`.

    An overlay cannot write into what it covers, so /tmp needs one elsewhere.
    """

    def __init__(self) -> None:
        self._number = 0
        self.folders: list[Path] = []
        self._locks: list[int] = []
        error: OSError | None = None
        for parent in _parents():
            try:
                self._make(parent)
            except OSError as reason:
                error = reason
            if len(self.folders) == 2:
                break
        if not self.folders:
            assert error is not None
            raise error
        self._free_bytes = [shutil.disk_usage(folder).free for folder in self.folders]

    def _make(self, parent: Path) -> None:
        if self.folders and parent.parts[:2] == self.folders[0].parts[:2]:
            return
        remove_abandoned(parent)
        made = Path(tempfile.mkdtemp(prefix=_UNLOCKED, dir=parent))
        lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Only now another process may ask whether it is abandoned.
        folder = made.rename(made.with_name(_PREFIX + made.name.removeprefix(_UNLOCKED)))
        self.folders.append(folder)
        self._locks.append(lock)

    def new(self, name: str) -> list[Path]:
        """An empty folder in each location."""
        self._number += 1
        made = [folder / f"{name}-{self._number}" for folder in self.folders]
        for one in made:
            one.mkdir()
        return made

    def written_too_much(self) -> str:
        """Why nothing more may be written: half of a disk's free space is gone; '' if it is not."""
        for folder, before in zip(self.folders, self._free_bytes, strict=True):
            left = shutil.disk_usage(folder).free
            if left < before / 2:
                written = (before - left) / 2**30
                what = f"{written:.1f} GiB, half of what was free on the disk of {folder.parent}"
                return f"it has written {what}"
        return ""

    def close(self) -> None:
        for folder, lock in zip(self.folders, self._locks, strict=True):
            remove_tree(folder)
            os.close(lock)
        self.folders.clear()
        self._locks.clear()

    def __enter__(self) -> "Scratch":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _parents() -> list[Path]:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    names = (tempfile.gettempdir(), "/var/tmp", cache, "/tmp")
    folders = [real for name in names if (real := Path(name).resolve()).is_dir()]
    if not Path("/proc/self/mountinfo").exists():
        return folders
    mounts = read_mounts()
    # A tmpfs takes memory, and before Linux 6.6 an overlay on it cannot replace a folder.
    return sorted(folders, key=lambda folder: mount_of(str(folder), mounts).kind == "tmpfs")


def remove_abandoned(parent: Path) -> None:
    """Remove scratch folders in `parent` whose process was killed."""
    for folder in parent.glob(f"{_UNLOCKED}*"):  # killed before it could lock the folder
        with suppress(OSError):
            facts = folder.stat()
            if facts.st_uid == os.geteuid() and time.time() - facts.st_mtime > _LOCKED_BY_THEN_S:
                remove_tree(folder)
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for trial in folder.glob("trial-*"):  # whose processes may still run
                    end_processes(trial)
                remove_tree(folder)
            finally:
                os.close(lock)


def remove_tree(folder: Path) -> None:
    """Remove a folder, and those in it that an overlay has made unreadable."""

    def allow(_: Callable[..., object], name: str, __: object) -> None:
        path = Path(name)
        with suppress(OSError):
            path.parent.chmod(0o700)
            # chmod would follow a link to the user's files.
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()

    shutil.rmtree(folder, onerror=allow)
