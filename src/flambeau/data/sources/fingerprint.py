"""Fingerprints of a packed file, or of many files, without reading all of their content."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

_MIB = 1 << 20
_FILES = 64  # sampled of many; chosen
# At the start and end of each: more than the headers that files of one camera share.
_ENDS_BYTES = 1 << 13


def size_of(path: Path) -> int:
    """Bytes of a file; -1 if missing, which is reported when it is read."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def file_fingerprint(path: Path, facts: str) -> str:
    """SHA-256, hexadecimal, of a file's size, first and last MiB, and `facts`; not of its path."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        for start in (0, max(0, size - _MIB)):
            file.seek(start)
            digest.update(file.read(_MIB))
    digest.update(f"{size} {facts}".encode())
    return digest.hexdigest()


def sampled_content(count: int, file_of: Callable[[int], Path]) -> str:
    """SHA-256, hexadecimal, of both ends of some dozen files, evenly spread: 3 ms.

    It tells data of equal names and sizes apart, such as arrays of one shape.
    """
    digest = hashlib.sha256()
    for number in range(min(count, _FILES)):
        try:
            with file_of(number * count // min(count, _FILES)).open("rb") as file:
                digest.update(file.read(_ENDS_BYTES))
                file.seek(max(0, file.seek(0, os.SEEK_END) - _ENDS_BYTES))
                digest.update(file.read(_ENDS_BYTES))
        except OSError:  # a bad image, which is reported when it is read
            digest.update(b"-")
    return digest.hexdigest()
