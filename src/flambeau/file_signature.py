"""The kind of a file by its first bytes, for messages about files that are not what their names say.

Source: the signatures that the formats define; for ONNX, which has none, the first fields of its ModelProto.
Not for deciding that a file is good: its reader checks everything it claims.
"""

import contextlib
import os
import re
import shlex
import zlib
from pathlib import Path
from typing import NamedTuple

_HEAD = 4096  # bytes that are read
_QUOTED = 60  # characters of a text in a message

# Kinds of files that a checkout or download leaves instead of the real file.
STAND_INS = frozenset({"git-lfs", "git-annex", "web page", "empty"})


class Signature(NamedTuple):
    """The kind of a file.

    Attributes:
        kind: 'git-lfs', 'git-annex', 'web page', 'empty', 'zip', 'gzip', 'hdf5', 'json', 'text' and so on.
    """

    kind: str
    what: str
    cure: str

    @property
    def is_image(self) -> bool:
        """Whether it is an image, of a format that is read or of another."""
        return self.what.endswith(" image")

    @property
    def sentence(self) -> str:
        """The end of a message: '... is a gzip file: unpack it with `gunzip`'."""
        return f"{self.what}: {self.cure}"


_PACKED = "unpack it with `{}`, and give what was in it"
_COMPRESSORS = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_BZIP2 = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # what follows the size: a block, or the end
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
_INFLATE = 'python -c "import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))" <'
_UNPACKED = {
    ".tgz": ".tar",
    ".gz": "",
    ".bz2": "",
    ".xz": "",
    ".zst": "",
}  # added to the inner name
NOT_READ = "it is not read here: save it as JPEG or PNG"
# A table: offset, bytes, name, what it is, what to do; one row per format.
_SIGNATURES = [
    (0, b"7z\xbc\xaf\x27\x1c", "7z", "a 7z archive", _PACKED.format("7z x FILE")),
    (0, b"Rar!\x1a\x07", "rar", "a RAR archive", _PACKED.format("unrar x FILE")),
    (0, b"PK\3\4", "zip", "a zip archive", _PACKED.format("unzip FILE")),
    (0, b"PK\5\6", "zip", "an empty zip archive", "copy or make it again"),
    (257, b"ustar", "tar", "a tar archive", _PACKED.format("tar xf FILE")),
    (0, b"\x89HDF\r\n\x1a\n", "hdf5", "an HDF5 file", "h5py reads it, or Keras if it saved a model"),
    (0, b"\x93NUMPY", "npy", "an array of NumPy", "numpy.load reads it"),
    (0, b"GGUF", "gguf", "a GGUF model of llama.cpp", "the package gguf reads it"),
    (4, b"TFL3", "tflite", "a model of TensorFlow Lite", "the package ai-edge-litert runs it"),
    (0, b"\x12\x01" + bytes(6), "mxnet", "weights of MXNet", "mxnet.nd.load reads it"),
    (0, b"\x89PNG\r\n\x1a\n", "png", "a PNG image", "give a file of the kind that its name says"),
    (0, b"\xff\xd8\xff", "jpeg", "a JPEG image", "give a file of the kind that its name says"),
    *((4, b"ftyp" + brand, "heic", "a HEIC image", NOT_READ) for brand in (b"heic", b"heix", b"mif1")),
    *((4, b"ftyp" + brand, "avif", "an AVIF image", NOT_READ) for brand in (b"avif", b"avis")),
    (0, b"\0\0\0\x0cJXL \r\n\x87\n", "jxl", "a JPEG XL image", NOT_READ),
    *((0, magic, "jp2", "a JPEG 2000 image", NOT_READ)
      for magic in (b"\0\0\0\x0cjP  \r\n\x87\n", b"\xff\x4f\xff\x51")),
    (0, b"II\xbc\x01", "jxr", "a JPEG XR image", NOT_READ),
    (0, b"8BPS\0\1", "psd", "a Photoshop image", NOT_READ),
    (0, b"v/1\x01", "exr", "an OpenEXR image", NOT_READ),
    (0, b"#?RADIANCE\n", "hdr", "a Radiance HDR image", NOT_READ),
    (0, b"DDS |\0\0\0", "dds", "a DirectDraw image", NOT_READ),
    (0, b"qoif\0\0", "qoi", "a QOI image", NOT_READ),
    (128, b"DICM", "dicom", "a DICOM image", NOT_READ),
    (0, b"%PDF-", "pdf", "a PDF document", "give a file of the kind that its name says"),
    (0, b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9", "torch",
     "a file of torch.save before PyTorch 1.6", "torch.load reads it"),
    *((0, bytes((128, n)), "pickle", "a pickle", "read it with what has written it") for n in range(2, 6)),
]  # fmt: skip


ANNEXED = Signature(
    "git-annex",
    "a pointer of git-annex, and not the file itself",
    "fetch that with `git annex get`",
)
_POINTER_OF_ANNEX = re.compile(rb"[./]*(\.git)?/annex/objects/\S")


def signature(path: Path) -> Signature | None:
    """The kind of a file, or git-annex's broken link; None if its first bytes say nothing."""
    if not path.exists() and is_annexed(path):
        return ANNEXED
    if path.is_symlink() and not path.exists():
        return None
    if path.exists() and not (path.is_file() or path.is_dir()):
        return None  # reading a pipe would never end
    with path.open("rb") as file:
        return signature_of(file.read(_HEAD), path)


def signature_of(head: bytes, path: Path = Path("FILE")) -> Signature | None:
    """The kind of a file from its first bytes, up to 4096."""
    return _stand_in(head) or _compressed(head, path) or _binary(head, path) or _text(head)


def is_annexed(path: Path) -> bool:
    """Whether a link leads into the objects of git-annex, even if its target is missing."""
    return "/.git/annex/objects/" in os.path.realpath(path).replace(os.sep, "/")


def _stand_in(head: bytes) -> Signature | None:
    if not head:
        return Signature("empty", "an empty file", "copy or download it again")
    if not any(head):  # as after a crash, or at the start of a download
        return Signature(
            "zeros", "a file of zeros, which nothing wrote", "copy or download it again"
        )
    if b"<svg" in head and head.lstrip().startswith(b"<"):
        return Signature("svg", "an SVG drawing", NOT_READ)
    if head.lstrip()[:15].lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        what = "a web page, and not the file itself"
        cure = "open it to see what the server said, and download the file again"
        return Signature("web page", what, cure)
    return _pointer(head)


def _pointer(head: bytes) -> Signature | None:
    if head.startswith(b"version https://git-lfs"):
        what = "a pointer of Git LFS, and not the file itself"
        return Signature("git-lfs", what, "fetch that with `git lfs pull`")
    is_annex = _POINTER_OF_ANNEX.match(head) and b"\0" not in head
    return ANNEXED if is_annex else None


def _compressed(head: bytes, path: Path) -> Signature | None:
    quoted = shlex.quote(str(path))
    new = f"NEW{_UNPACKED.get(path.suffix, path.suffix) or Path(path.stem).suffix}"
    name = next((name for magic, name in _COMPRESSORS.items() if head.startswith(magic)), None)
    if name is not None and (name != "bzip2" or head[4:10] in _BZIP2):
        article = "an" if name == "xz" else "a"
        return Signature(
            name, f"{article} {name} file", _PACKED.format(f"{name} -dc {quoted} > {new}")
        )
    if head.startswith(_ZLIB) and _inflates(head):
        return Signature("zlib", "a zlib stream", _PACKED.format(f"{_INFLATE} {quoted} > {new}"))
    return None


def _inflates(head: bytes) -> bool:
    """Whether it is deflated data: the two magic bytes alone may be the length of a record of TFRecord."""
    try:
        zlib.decompressobj().decompress(head)
    except zlib.error:
        return False
    return True


def _binary(head: bytes, path: Path) -> Signature | None:
    for offset, magic, kind, what, cure in _SIGNATURES:
        if head.startswith(magic, offset):
            return Signature(kind, what, cure.replace("FILE", shlex.quote(str(path))))
    if head.startswith(b"\xff\x0a") and any(head[2:8]):  # not the length of a record of TFRecord
        return Signature("jxl", "a JPEG XL image", NOT_READ)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30:
        return Signature("safetensors", "a safetensors file", "name it NAME.safetensors")
    # ir_version, of 3 or more, and then producer_name, which is text, or the graph.
    start = head[:4].ljust(4, b"\0")
    is_named = start[2] == 0x12 and head[4 : 4 + start[3]].isascii()
    if start[0] == 8 and 3 <= start[1] < 32 and (is_named or start[2] == 0x3A):
        return Signature("onnx", "a model of ONNX", "the packages onnx and onnxruntime read it")
    return None


def _text(head: bytes) -> Signature | None:
    text = None
    for cut in range(4):  # the last character may not be whole
        with contextlib.suppress(UnicodeDecodeError):
            text = head[: len(head) - cut].decode("utf-8-sig")
            break
    if text is None or not all(c.isprintable() or c in "\t\n\r\f" for c in text):
        return None
    if text.lstrip()[:1] in ("{", "["):
        return Signature("json", "a JSON text", "open it to see what it is")
    start = next((line.strip() for line in text.splitlines() if line.strip()), "")[:_QUOTED]
    return Signature("text", f"a text that begins with {start!r}", "open it to see what it is")
