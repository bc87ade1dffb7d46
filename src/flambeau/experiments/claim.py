"""A claim on one run of a sweep: processes of this machine and of others leave it alone meanwhile.

The lock ends with the process that holds it, also where its host is lost: a server of NFS 4 drops the locks
of a host that no longer answers. Where a mount keeps locks to each host, the time at which the owner last
touched the file says that it lives.
"""

import contextlib
import os
import socket
import threading
from pathlib import Path

from flambeau.errors import naming

_TOUCH_S = 15.0
_LOST_S = 90.0  # without a touch, the host of the owner is lost


class Claim:
    """Args: path of a file of its own, made if it is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._ended = threading.Event()

    def take(self) -> int | None:
        """Take it; returns the file for a child that shares the claim. None: somebody has it."""
        import fcntl

        fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return None
        here = socket.gethostname()
        owner = os.read(fd, 300).decode(errors="replace").strip()
        if owner not in ("", here) and _is_touched(fd):
            os.close(fd)
            return None
        try:
            with naming(self._path):
                os.lseek(fd, 0, os.SEEK_SET)
                os.ftruncate(fd, 0)
                os.write(fd, f"{here}\n".encode())
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self._ended.clear()
        threading.Thread(target=self._keep_touching, daemon=True).start()
        return fd

    def release(self) -> None:
        """Give it back; nothing happens if it is not held."""
        self._ended.set()
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
            os.close(fd)

    def _keep_touching(self) -> None:
        while not self._ended.wait(_TOUCH_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)


def _is_touched(fd: int) -> bool:
    """Whether the time of a file was set a short while ago, by the clock of whoever keeps the file."""
    before = os.fstat(fd).st_mtime
    os.utime(fd)  # sets it to the server's time
    now = os.fstat(fd).st_mtime
    os.utime(fd, (before, before))
    return now - before < _LOST_S
