"""Folders for what a view's processes write: locked while in use, and removed whoever made them and died."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from flambeau.sandbox.mounts import mount_of, read_mounts
from flambeau.sandbox.processes import end_processes

_PREFIX = "flambeau-trials-"
_LOCK = "in_use"


class Scratch:
    """Empty folders in up to two places of the disk, removed by `close`.

    Overlays cannot write into the folder that they cover, so /tmp is covered with what lies elsewhere.

    Raises:
        OSError: no folder can be made anywhere.
    """

    def __init__(self) -> None:
        self._number = 0
        self.folders: list[Path] = []
        self._locks: list[int] = []
        error: OSError | None = None
        for place in _places():
            try:
                self._make(place)
            except OSError as reason:
                error = reason
            if len(self.folders) == 2:
                break
        if not self.folders:
            assert error is not None
            raise error
        self._free_bytes = [shutil.disk_usage(folder).free for folder in self.folders]

    def _make(self, place: Path) -> None:
        if self.folders and place.parts[:2] == self.folders[0].parts[:2]:
            return
        remove_abandoned(place)
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.folders.append(folder)
        self._locks.append(lock)

    def new(self, name: str) -> list[Path]:
        """An empty folder in each place."""
        self._number += 1
        made = [folder / f"{name}-{self._number}" for folder in self.folders]
        for one in made:
            one.mkdir()
        return made

    def written_too_much(self) -> str:
        """Why nothing more may be written: half of a disk's free space is gone. Empty while it is not."""
        for folder, before in zip(self.folders, self._free_bytes, strict=True):
            left = shutil.disk_usage(folder).free
            if left < before / 2:
                written = (before - left) / 2**30
                what = f"{written:.1f} GiB, half of what was free on the disk of {folder.parent}"
                return f"it has written {what}"
        return ""

    def close(self) -> None:
        """Remove all of it."""
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


def _places() -> list[Path]:
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    names = (tempfile.gettempdir(), "/var/tmp", cache, "/tmp")
    found = [real for name in names if (real := Path(name).resolve()).is_dir()]
    if not Path("/proc/self/mountinfo").exists():
        return found
    mounts = read_mounts()
    # What is written to a tmpfs takes memory, and before Linux 6.6 an overlay on it cannot replace a folder.
    return sorted(found, key=lambda folder: mount_of(str(folder), mounts).kind == "tmpfs")


def remove_abandoned(place: Path) -> None:
    """Remove folders whose process has ended without doing so, by a kill.

    Args:
        place: where they are.
    """
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid != os.geteuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for trial in folder.glob("trial-*"):  # whose processes may go on
                    end_processes(trial)
                remove_tree(folder)
            finally:
                os.close(lock)


def remove_tree(folder: Path) -> None:
    """Remove a folder, with those in it that an overlay has made unreadable."""

    def allow(_: Callable[..., object], name: str, __: object) -> None:
        path = Path(name)
        with suppress(OSError):
            path.parent.chmod(0o700)
            if (
                path.is_dir() and not path.is_symlink()
            ):  # chmod would follow a link to what is not ours
                path.chmod(0o700)
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()

    shutil.rmtree(folder, onerror=allow)
