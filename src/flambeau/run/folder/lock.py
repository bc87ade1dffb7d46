"""The lock of a run folder: one process at a time writes there; others can test for it."""

import errno
import os
import struct
import sys
from pathlib import Path

from flambeau.errors import InputError, naming

_LOCKED: set[tuple[int, int]] = set()  # locks that this process holds
_WRITTEN_IN_PLACE = (".lock", "metrics.jsonl", "events.jsonl", "metrics.csv", ".metrics.csv.new")


class RunLock:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def take(self) -> None:
        """Keep other processes out until `release` or the end of this process.

        InputError: another process trains here, or a link leads out of the folder.
        """
        _refuse_links(self._folder)
        try:
            import fcntl
        except ImportError:  # Windows: no lock, so the user must avoid two runs in one folder
            return
        # A process can always take its own lock again, and closing a second descriptor would release it.
        lock = self._folder / ".lock"
        if lock.exists() and _identity(lock.stat()) in _LOCKED:
            raise InputError(
                f"another Run of this process is training in {self._folder}; call its close() first, or "
                "choose another folder"
            )
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # A POSIX lock belongs to the process: forked workers that outlive a killed one do not hold it.
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            if error.errno not in {errno.EACCES, errno.EAGAIN}:  # the disk has no locks
                raise OSError(error.errno, error.strerror, str(lock)) from error
            who = f"process {owner}" if owner else "another process"
            raise InputError(
                f"{who} is training in {self._folder} right now; wait for it or choose another folder"
            ) from None
        try:
            with naming(lock):
                os.truncate(handle, 0)
                os.write(handle, f"{os.getpid()}\n".encode())
        except OSError:
            os.close(handle)
            raise
        self._file = handle
        _LOCKED.add(_identity(os.fstat(handle)))

    def release(self) -> None:
        if self._file is not None:
            _LOCKED.discard(_identity(os.fstat(self._file)))
            os.close(self._file)
            self._file = None


def _refuse_links(folder: Path) -> None:
    """Refuse links at which a run would cut, append or delete: a folder from elsewhere may have any."""
    linked = [folder / name for name in _WRITTEN_IN_PLACE if (folder / name).is_symlink()]
    checkpoints = folder / "checkpoints"
    if checkpoints.is_symlink():  # to a larger disk, say, but not into another run
        around = checkpoints.resolve().parent
        if around != folder.resolve() and (around / "config.toml").exists():
            linked.append(checkpoints)
    if linked:
        raise InputError(
            f"{linked[0]} is a link to {os.path.realpath(linked[0])}, into which this run would write: "
            "remove the link, or choose another folder"
        )


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder now, without touching the lock.

    False on systems other than Linux.
    """
    lock = folder / ".lock"
    try:
        if _identity(lock.stat()) in _LOCKED:
            return True  # opening and closing the file here would release the lock
        if sys.platform != "linux" or not lock.is_file():
            return False
        file = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    import fcntl

    # struct flock: kind of lock, from where, offset, length, process. F_GETLK takes no lock; taking one for
    # an instant could refuse a run that starts in that instant.
    layout = "hhqqi4x"
    try:
        request = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, request)
        return bool(struct.unpack(layout, answer)[0] != fcntl.F_UNLCK)
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
