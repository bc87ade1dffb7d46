"""Files that are no images although they should be: pointers, archives, web pages, unsupported images."""

import errno
from pathlib import Path

from flambeau.file_signature import (
    ANNEXED,
    NOT_READ,
    STAND_INS,
    Signature,
    is_annexed,
    signature,
    signature_of,
)

_KINDS = STAND_INS - {"empty"} | {
    "gzip",
    "bzip2",
    "xz",
    "zstd",
    "zlib",
    "zip",
    "7z",
    "rar",
    "pdf",
}
_ZIPPED = (".zip", ".npz", ".pth", ".pt")  # formats that are zip archives themselves


def stand_in(head: bytes, path: Path = Path("FILE")) -> str | None:
    """What kind of file this is instead of images, and the remedy; None if that is unknown."""
    return _sentence(signature_of(head, path), path)


def stand_in_at(path: Path) -> str | None:
    """As `stand_in`, for a path, also git-annex's broken link; a folder is an LMDB file's."""
    try:
        kind = signature(path / "data.mdb" if path.is_dir() else path)
    except OSError:
        return None
    return _sentence(kind, path)


def why_unreadable(error: OSError) -> str:
    """Why an image could not be read, without its path."""
    if error.errno == errno.ENOENT and error.filename and is_annexed(Path(error.filename)):
        return f"this is {ANNEXED.sentence}"
    return error.strerror.lower() if error.strerror else str(error)


def _sentence(kind: Signature | None, path: Path) -> str | None:
    if kind is None or (kind.kind not in _KINDS and kind.cure != NOT_READ):
        return None
    is_format = kind.kind == "zip" and path.suffix.lower().startswith(_ZIPPED)
    return None if is_format else kind.sentence
