"""The lock of a run folder: one process at a time writes there, and others can ask whether one does."""

import os
import struct
import sys
from pathlib import Path

from flambeau.errors import InputError

_LOCKED: set[tuple[int, int]] = set()  # by this process


class RunLock:
    """The lock of one folder.

    Args:
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: int | None = None

    def take(self) -> None:
        """Keep other processes out until `release`, or until this one ends.

        Raises:
            InputError: another Run trains there.
        """
        try:
            import fcntl
        except ImportError:  # Windows: no lock, so two runs in one folder are the user's to avoid
            return
        # A process is never refused its own lock, and closing a second descriptor would give it up.
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
        except OSError:
            owner = os.read(handle, 20).decode(errors="replace").strip()
            os.close(handle)
            raise InputError(
                f"process {owner} is training in {self._folder} right now; wait for it or choose another "
                "folder"
            ) from None
        os.truncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._file = handle
        _LOCKED.add(_identity(os.fstat(handle)))

    def release(self) -> None:
        """Let other processes write there again."""
        if self._file is not None:
            _LOCKED.discard(_identity(os.fstat(self._file)))
            os.close(self._file)
            self._file = None


def is_locked(folder: Path) -> bool:
    """Whether a process trains in the folder now; the lock itself is left alone.

    Where the system cannot tell (Windows, other systems than Linux), False.
    """
    lock = folder / ".lock"
    try:
        if _identity(lock.stat()) in _LOCKED:
            return True  # and opening the file here, then closing it, would give the lock up
        if sys.platform != "linux" or not lock.is_file():
            return False
        file = os.open(lock, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    import fcntl

    # struct flock: kind of lock, from where, offset, length, process. Asking takes nothing, while a lock for
    # an instant could turn away a run that starts in it.
    layout = "hhqqi4x"
    try:
        asked = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(file, fcntl.F_GETLK, asked)
        return bool(struct.unpack(layout, answer)[0] != fcntl.F_UNLCK)
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
