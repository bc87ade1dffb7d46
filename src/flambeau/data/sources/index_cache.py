"""An index of a file that has none, built once and kept beside the file."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.errors import ZIP_ERRORS
from flambeau.unfinished_file import unfinished

Arrays = Mapping[str, NDArray[Any]]

INDEX_SUFFIX = ".flambeau-index"
_VERSION = 1
_SAMPLE = 1 << 16  # bytes at both ends of the file that identify it, with its size


def stored_index(
    path: Path, build: Callable[[], Arrays], *, kind: str, stamp: str | None = None
) -> dict[str, NDArray[Any]]:
    """The result of `build` for a file or folder, or the stored one of an earlier call.

    It is kept as PATH.flambeau-index (a .npz without objects), written atomically, where the folder can be
    written. It is built again if damaged, if the file has another size, time or content at its ends, and for
    another `kind`, such as 'tfrecord 1', or `stamp`, which changes with a folder's content.
    """
    facts = f"{_VERSION} {kind} {_stamp(path) if stamp is None else stamp}"
    marked = np.frombuffer(facts.encode(), np.uint8)
    kept = path.with_name(path.name + INDEX_SUFFIX)
    with (
        contextlib.suppress(*ZIP_ERRORS, OSError, KeyError, MemoryError),
        kept.open("rb") as file,  # np.load itself leaves a damaged one open
        np.load(file, allow_pickle=False) as stored,
    ):
        if np.array_equal(stored["stamp"], marked):
            return {name: stored[name] for name in stored.files if name != "stamp"}
    arrays = dict(build())
    assert not any(array.dtype.hasobject for array in arrays.values())
    _write(kept, {**arrays, "stamp": marked})
    return arrays


def joined(texts: Iterable[str]) -> NDArray[np.uint8]:
    """Texts without zeros as one array, each followed by a zero."""
    data = "".join(f"{text}\0" for text in texts).encode(errors="surrogateescape")
    return np.frombuffer(data, np.uint8)


def split_texts(array: NDArray[Any]) -> list[str]:
    """The inverse of `joined`."""
    return array.tobytes().decode(errors="surrogateescape").split("\0")[:-1]


def _stamp(path: Path) -> str:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        digest = hashlib.sha256(file.read(_SAMPLE))
        file.seek(max(0, status.st_size - _SAMPLE))
        digest.update(file.read(_SAMPLE))
    return f"{status.st_size} {status.st_mtime_ns} {digest.hexdigest()}"


def _write(path: Path, arrays: Arrays) -> None:
    temporary = unfinished(path)
    try:
        with temporary.open("xb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # mypy takes it for the keyword allow_pickle
        temporary.replace(path)
    except OSError:  # a folder of other users, a full disk: the index is optional
        with contextlib.suppress(OSError):
            temporary.unlink()
