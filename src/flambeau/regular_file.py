"""Reads a whole file that somebody else has named."""

import errno
import os
import stat
from pathlib import Path

_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def read_file(path: Path) -> bytes:
    """All of a regular file; OSError of a pipe or a device, which need not have an end."""
    number = os.open(path, _FLAGS)
    with os.fdopen(number, "rb") as file:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, and no file", str(path))
        return file.read()
