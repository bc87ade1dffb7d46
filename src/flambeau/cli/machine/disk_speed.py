"""How fast a folder is written and read, with an unnamed file, so that nothing can be left behind."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from flambeau.errors import InputError

_MIB = 1 << 20
_PIECE = 32 * _MIB  # written between two calls of fsync; chosen
_MAX = 512 * _MIB
_SECONDS = 3.0  # each for writing and reading; a slow disk adds one fsync


def disk_speed(
    folder: Path, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, str | int | float | None]:
    """Write a file of at most 512 MiB for about three seconds, and read it for as long.

    Args:
        folder: at most a third of its free space is used meanwhile.
        clock: seconds.

    Returns:
        The given folder, `write_mib_per_s` including fsync, `read_mib_per_s` without the system's cache (None
        if that cannot be bypassed), and `free_bytes`.

    Raises:
        InputError: no such folder, or it is not writable.
    """
    if not folder.is_dir():
        raise InputError(f"--disk {folder}: there is no such folder")
    free = shutil.disk_usage(folder).free
    if free < 3 * _PIECE:
        raise InputError(
            f"--disk {folder}: {free // _MIB} MiB are left there, too few to measure it"
        )
    try:
        # Without a name, where possible, not even SIGKILL leaves it behind.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            size, write = _write(file, min(_MAX, free // 3), clock)
            read = _read(file, size, clock)
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise InputError(
            f"--disk {folder}: {why}; name a folder that you may write into"
        ) from error
    return {
        "folder": str(folder),
        "write_mib_per_s": round(write, 1),
        "read_mib_per_s": None if read is None else round(read, 1),
        "free_bytes": free,
    }


def _write(file: IO[Any], most: int, clock: Callable[[], float]) -> tuple[int, float]:
    """Bytes written, and MiB per second."""
    noise = os.urandom(_PIECE)  # a file system may compress anything else
    size = 0
    start = clock()
    while size + _PIECE <= most and clock() - start < _SECONDS:
        left = memoryview(noise)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())
        size += _PIECE
    return size, size / _MIB / max(clock() - start, 1e-9)


def _read(file: IO[Any], size: int, clock: Callable[[], float]) -> float | None:
    if not hasattr(os, "posix_fadvise"):
        return None
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    buffer = memoryview(bytearray(_PIECE))
    start = clock()
    done = 0
    while done < size and clock() - start < _SECONDS:
        done += os.readv(file.fileno(), [buffer])
    return done / _MIB / max(clock() - start, 1e-9)
