"""Labelled images in an LMDB file.

The format is that of flambeau.recipes.data.lmdb_records. The pickled pairs are those of
`tools/folder2lmdb.py` in Lyken17/Efficient-PyTorch and its copies.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.data.sources.class_names_file import named_labels
from flambeau.data.sources.fingerprint import file_fingerprint
from flambeau.data.sources.index_cache import stored_index
from flambeau.errors import DamagedData, InputError, unreadable
from flambeau.images.decode import Stored
from flambeau.images.file_formats import format_of
from flambeau.recipes.checkpoints.safe_pickle import plain_pickle
from flambeau.recipes.data.lmdb_records import LMDBError, LMDBIndex, LMDBReader, LMDBUnfit, lmdb_key
from flambeau.recipes.data.recordio import RecordError, unpack

_INDEX = "lmdb 1"
_MAX_KEY = 511  # bytes; a limit of LMDB
_NUM_PROBED = 64  # values that may be damaged before the file counts as one without images
_PIXELS = ("|u", "<u", "|i", "<i", "|b")  # NumPy types that pixels may have
_PICKLES = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class LMDBSource:
    """Images in an LMDB file, in the byte order of their keys.

    The first recognized value decides the kind of all:

    - an image file under the key CLASS/NAME (what flambeau writes);
    - a pickled pair of image (a file's bytes or an array of pixels) and label (number or name of a class),
      each possibly in a list or array of one, as ImageFolder2LMDB writes it. It is parsed, never executed: a
      pickle of anything but plain data is refused;
    - an IRHeader with the number of a class, and an image file, as in RecordIO.

    Keys like `__len__` are skipped. Labels and offsets are read once and kept by `stored_index`.
    """

    def __init__(self, path: Path, *, labelled: bool = True) -> None:
        self._path = path
        file = path / "data.mdb" if path.is_dir() else path
        try:
            kind = _INDEX if labelled else f"{_INDEX} without labels"
            index = stored_index(file, partial(_index, path, labelled=labelled), kind=kind)
            ends = index["key_ends"].tolist()
            joined = index["keys"].tobytes()
            keys = tuple(joined[a:b] for a, b in zip([0, *ends], ends, strict=False))
            starts, sizes = (array("Q", index[name].tobytes()) for name in ("starts", "sizes"))
            self._reader = LMDBReader(path, index=LMDBIndex(keys, starts, sizes))
            self._kind = int(index["kind"])
            words = index["words"]
            labels = (words[index["labels"]] if len(words) else index["labels"]).tolist()
            self.classes, self.labels = named_labels(
                labels if labelled else [0] * len(keys),
                path,
                self.describe,
                labelled=labelled,
                by_folder=self._kind == _FILE,
            )
            facts = hashlib.sha256(b"%d " % len(keys) + joined + index["labels"].tobytes())
            self.fingerprint = file_fingerprint(file, f"{facts.hexdigest()} {self.classes}")
        except LMDBError as error:
            kind_of_error = InputError if isinstance(error, LMDBUnfit) else DamagedData
            raise kind_of_error(
                f"{error}\nCopy or make it again: flambeau pack writes LMDB files"
            ) from error
        except OSError as error:
            raise unreadable(file, error) from error

    @property
    def names(self) -> Sequence[str]:
        return [key.decode(errors="surrogateescape") for key in self._reader.keys]

    def __len__(self) -> int:
        return len(self._reader)

    def describe(self, index: int) -> str:
        return f"{self._path}, key {_printable(self._reader.keys[index])}"

    def read(self, index: int) -> Stored:
        try:
            return _image_of(self._kind, self._reader[index])
        except (LMDBError, ValueError) as error:
            raise OSError(str(error)) from error


def image_key(class_name: str, name: str) -> bytes:
    """The key from which an LMDBSource reads an image's class: CLASS/NAME, where NAME may begin so already.

    Too long a name is replaced by its SHA-256.
    """
    prefix = f"{class_name}/"
    if not class_name or "/" in class_name or class_name[:2] == "__" or len(prefix.encode()) > 255:
        raise InputError(
            f"class {class_name!r} cannot be stored in an LMDB file, whose keys are CLASS/NAME\n"
            "A class name there has 1 to 254 bytes, no slash, and does not begin with __"
        )
    key = (prefix + name.removeprefix(prefix)).encode(errors="surrogateescape")
    if len(key) <= _MAX_KEY:
        return lmdb_key(key)
    return lmdb_key(prefix + hashlib.sha256(key).hexdigest())


# ---------------------------------------------------------------- what a value is


_FILE, _PICKLE, _HEADER = range(3)


def _label_of(kind: int, key: bytes, value: Callable[[], bytes]) -> int | str:
    """Number or name of a class; `value` is read only if needed. ValueError with the reason."""
    if kind == _PICKLE:
        return _pair(value())[1]
    if kind == _FILE:
        name, slash, _ = key.partition(b"/")
        if not slash or not name:
            raise ValueError("the key names no class; expected CLASS/NAME")
        return name.decode()
    label = unpack(value())[0].label
    if not isinstance(label, float) or not label.is_integer():
        raise ValueError("its IRHeader holds no single whole number as label")
    return int(label)


def _image_of(kind: int, value: bytes) -> Stored:
    """The image in a value; ValueError with the reason."""
    if kind == _FILE:
        return value
    return _pair(value)[0] if kind == _PICKLE else unpack(value)[1]


def _kind_of(value: bytes) -> int | None:
    if format_of(value):
        return _FILE
    if value.startswith(_PICKLES):
        return _PICKLE
    try:
        return _HEADER if format_of(unpack(value)[1]) else None
    except RecordError:
        return None


def _index(path: Path, *, labelled: bool) -> dict[str, NDArray[Any]]:
    """The content of `stored_index`: keys, offsets, kind, labels, and words in which labels are positions."""
    reader = LMDBReader(path)
    numbers = [
        i for i, k in enumerate(reader.keys) if not (k.startswith(b"__") and k.endswith(b"__"))
    ]
    kinds = (_kind_of(reader[number]) for number in numbers[:_NUM_PROBED])
    kind = next((kind for kind in kinds if kind is not None), None)
    if numbers and kind is None:
        raise InputError(
            f"{path}, key {_printable(reader.keys[numbers[0]])}: neither an image file, nor a pickled pair "
            "of image and label, nor an IRHeader with an image\n"
            "Make it again from the images, with flambeau pack FOLDER NAME.lmdb"
        )
    labels: list[int | str] = []
    for number in numbers if labelled else ():
        key = reader.keys[number]
        try:
            labels.append(_label_of(kind or _FILE, key, partial(reader.__getitem__, number)))
            if isinstance(labels[-1], int) and abs(labels[-1]) >> 31:
                raise ValueError(f"label {labels[-1]} is no number of a class")
            if type(labels[-1]) is not type(labels[0]):
                raise ValueError(f"label {labels[-1]!r} beside labels like {labels[0]!r}")
        except LMDBError:
            raise
        except ValueError as error:
            raise InputError(
                f"{path}, key {_printable(key)}: {error}\nRepair or remove it, or make the file again"
            ) from error
    words = sorted({label for label in labels if isinstance(label, str)})
    position: dict[int | str, int] = {word: index for index, word in enumerate(words)}
    keys = [reader.keys[number] for number in numbers]
    return {
        "keys": np.frombuffer(b"".join(keys), np.uint8),
        "key_ends": np.cumsum([len(key) for key in keys], dtype=np.int64),
        "starts": np.array(reader.index.starts, np.uint64)[numbers],
        "sizes": np.array(reader.index.sizes, np.uint64)[numbers],
        "kind": np.array(kind or _FILE),
        "labels": np.array([position.get(label, label) for label in labels], np.int64),
        "words": np.array(words, np.str_),
    }


def _printable(key: bytes) -> str:
    return repr(key.decode(errors="backslashreplace"))


# ---------------------------------------------------------------- pickles, parsed but never executed


def _pair(value: bytes) -> tuple[Stored, int | str]:
    """Image and label of a pickle; ValueError if it holds anything else."""
    content = plain_pickle(value)
    if isinstance(content, tuple | list) and len(content) == 2:
        # ImageFolder2LMDB takes both from a DataLoader, as a list of one and an array of one.
        image, label = (
            part[0] if isinstance(part, tuple | list) and len(part) == 1 else part
            for part in content
        )
        if isinstance(label, np.ndarray) and label.size == 1:
            label = label.item()
        if isinstance(image, str | bytearray):  # bytes of Python 2 are strings
            image = image.encode("latin-1") if isinstance(image, str) else bytes(image)
        pixels = isinstance(image, np.ndarray) and image.dtype.str[:2] in _PIXELS
        if (pixels or isinstance(image, bytes)) and type(label) in (int, str):
            return image, label
    raise ValueError(f"a pickle of {_outline(content)}; expected (image, label)")


def _outline(content: object) -> str:
    if isinstance(content, tuple | list):
        return (
            f"{type(content).__name__} of {', '.join(type(part).__name__ for part in content[:5])}"
        )
    return type(content).__name__
