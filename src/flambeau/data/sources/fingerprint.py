"""What distinguishes a file of packed images from another one, or many files from others, at little cost."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

_MIB = 1 << 20
_FILES = 64  # of many that are looked into; chosen
# At the begin and at the end of each: beyond what the files of one camera have alike.
_ENDS_BYTES = 1 << 13


def size_of(path: Path) -> int:
    """Bytes of a file; -1 where it is not there, which is a bad image that reading it will tell."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def file_fingerprint(path: Path, facts: str) -> str:
    """SHA-256, hexadecimal, of the size of a file, its first and last MiB, and what else is known of it.

    Args:
        path: the file; where it lies does not count.
        facts: such as names, labels and classes.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for start in (0, max(0, size - _MIB)):
            file.seek(start)
            digest.update(file.read(_MIB))
    digest.update(f"{size} {facts}".encode())
    return digest.hexdigest()


def sampled_content(count: int, file_of: Callable[[int], Path]) -> str:
    """SHA-256, hexadecimal, of both ends of some dozen files, evenly spread over many.

    Names and sizes tell most data apart, and not those of equal names and equal sizes: arrays of one shape,
    or images without compression. 64 files take 3 ms, of however many.

    Args:
        count: how many files there are.
        file_of: each by its number.
    """
    digest = hashlib.sha256()
    for number in range(min(count, _FILES)):
        try:
            with file_of(number * count // min(count, _FILES)).open("rb") as file:
                digest.update(file.read(_ENDS_BYTES))
                file.seek(max(0, file.seek(0, os.SEEK_END) - _ENDS_BYTES))
                digest.update(file.read(_ENDS_BYTES))
        except OSError:  # a bad image, which reading it will tell
            digest.update(b"-")
    return digest.hexdigest()
