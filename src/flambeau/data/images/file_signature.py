"""What stands in the place of images or packed images, by its first bytes: pointers, archives, web pages.

Source: Git LFS's docs/spec.md; git-annex's "pointer file" and "symlinks"; RFC 1950 and 1952; magic
numbers of bzip2, xz, zstd and zip; ISO/IEC 14496-12 for HEIC and AVIF.
"""

import errno
import os
import re
import zlib
from pathlib import Path

_POINTER_OF_ANNEX = re.compile(rb"[./]*(\.git)?/annex/objects/\S")
_HEAD = 4096  # bytes; a pointer of Git LFS has fewer than 1024
_PACKERS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_INFLATE = 'python -c "import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))"'
_UNPACKED = {".tgz": ".tar", ".gz": "", ".bz2": "", ".xz": "", ".zst": ""}  # behind the name within
_ZIPPED = (".npz", ".pth", ".pt")  # formats that are zip archives themselves
_ANNEX = "a pointer of git-annex and not the data: fetch them by `git annex get`"


def stand_in(head: bytes, path: Path = Path("FILE")) -> str | None:
    """What bytes are that stand in the place of images, and what to do; None where they are nothing known.

    Args:
        head: the first bytes of a file.
        path: of the file, for the command that unpacks it.

    Example:
        >>> stand_in(b"version https://git-lfs.github.com/spec/v1")
        'a pointer of Git LFS and not the data: fetch them by `git lfs pull`'
    """
    text = head[:200].lstrip().lower()
    if text.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS and not the data: fetch them by `git lfs pull`"
    if _POINTER_OF_ANNEX.match(head) and b"\0" not in head:
        return _ANNEX
    if text.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page and not the data: open it to see what the server said, download anew"
    new = f"NEW{_UNPACKED.get(path.suffix, path.suffix) or Path(path.stem).suffix}"
    packer = next((name for magic, name in _PACKERS.items() if head.startswith(magic)), None)
    if packer is not None and (packer != "bzip2" or head[4:10] == b"1AY&SY"):
        return f"packed by {packer}: unpack it by `{packer} -dc {path} > {new}`"
    if head.startswith(_ZLIB) and _inflates(head):
        return f"packed by zlib: unpack it by `{_INFLATE} < {path} > {new}`"
    if head.startswith(b"PK\3\4") and not path.suffix.lower().startswith(_ZIPPED):
        return f"a zip archive: unpack it by `unzip {path}`"
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"avif", b"avis"):
        name = "an AVIF" if head[8:10] == b"av" else "a HEIC"
        return f"{name} image, which is not read: save it as JPEG or PNG"
    return None


def stand_in_at(path: Path) -> str | None:
    """As `stand_in`, of what lies at a path, also where it is a link of git-annex to nowhere.

    Args:
        path: of a file, or of the folder of an LMDB file.
    """
    file = path / "data.mdb" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            return stand_in(opened.read(_HEAD), path)
    except OSError:
        return _ANNEX if _is_annexed(file) else None


def why_unreadable(error: OSError) -> str:
    """Why an image could not be read, without its path.

    Example:
        >>> why_unreadable(FileNotFoundError(2, "No such file or directory", "a.png"))
        'no such file or directory'
    """
    if error.errno == errno.ENOENT and error.filename and _is_annexed(Path(error.filename)):
        return f"this is {_ANNEX}"
    return error.strerror.lower() if error.strerror else str(error)


def _is_annexed(path: Path) -> bool:
    return "/.git/annex/" in os.path.realpath(path).replace(os.sep, "/")


def _inflates(head: bytes) -> bool:
    """Whether it is deflated data: two bytes alone may be the length of a record of TFRecord."""
    try:
        zlib.decompressobj().decompress(head)
    except zlib.error:
        return False
    return True
