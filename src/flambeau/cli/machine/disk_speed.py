"""How fast a folder is written and read, with a file that has no name: nothing can be left behind."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from flambeau.errors import InputError

_MIB = 1 << 20
_PIECE = 32 * _MIB  # that are written before the disk is waited for; chosen
_MOST = 512 * _MIB
_SECONDS = 3.0  # for each of writing and reading; a slow disk is waited for once more


def disk_speed(
    folder: Path, *, clock: Callable[[], float] = time.perf_counter
) -> dict[str, str | int | float | None]:
    """Write a file of at most 512 MiB for about three seconds, and read it for as long.

    Args:
        folder: where; at most a third of its free space is taken, for as long as this lasts.
        clock: seconds.

    Returns:
        The folder as it was given, `write_mib_per_s` with the waiting for the disk, `read_mib_per_s` past the
        cache of the system (None where it cannot be passed: then it would be the speed of memory), and
        `free_bytes`.

    Raises:
        InputError: no such folder, or it cannot be written into.
    """
    if not folder.is_dir():
        raise InputError(f"--disk {folder}: there is no such folder")
    free = shutil.disk_usage(folder).free
    if free < 3 * _PIECE:
        raise InputError(
            f"--disk {folder}: {free // _MIB} MiB are left there, too few to measure it"
        )
    try:
        # Without a name where the system can: then not even SIGKILL leaves it behind.
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            size, write = _write(file, min(_MOST, free // 3), clock)
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
    """How many bytes have been written, and MiB per second."""
    noise = os.urandom(_PIECE)  # what can be compressed would be
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
    place = memoryview(bytearray(_PIECE))
    start = clock()
    done = 0
    while done < size and clock() - start < _SECONDS:
        done += os.readv(file.fileno(), [place])
    return done / _MIB / max(clock() - start, 1e-9)
