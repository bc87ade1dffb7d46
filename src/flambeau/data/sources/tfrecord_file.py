"""Labelled images in a TFRecord file.

The formats are those of flambeau.recipes.data.tfrecord and tf_example. The names of features are
those of TensorFlow's ImageNet scripts (`image/encoded`), TFDS (`image`, `label`), Kaggle's TPU data sets
(`class`, `target`, `image_name`) and common names of files in a sample (`jpg`, `cls`).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.class_names_file import named_labels
from flambeau.data.sources.fingerprint import file_fingerprint
from flambeau.data.sources.index_cache import Arrays, joined, split_texts, stored_index
from flambeau.data.sources.listing import numbers_or_words
from flambeau.errors import DamagedData, InputError, unreadable
from flambeau.images.decode import Stored
from flambeau.recipes.data.tf_example import parse_example
from flambeau.recipes.data.tfrecord import TFRecordError, TFRecordReader

Features = Mapping[str, list[bytes] | Tensor]

# Of each list, the first name that a record has is used.
IMAGES = (
    "image/encoded",
    "image",
    "image_raw",
    "image/raw",
    "image_bytes",
    "encoded",
    "img",
    "jpg",
    "jpeg",
    "png",
    "webp",
)
LABELS = (
    "image/class/label",
    "label",
    "image/label",
    "class",
    "class_id",
    "cls",
    "target",
    "fine_label",
    "image/class/text",
    "class_name",
    "class/text",
    "image/class/synset",
    "text",
)
NAMES = (
    "image/filename",
    "file_name",
    "filename",
    "image_name",
    "image_id",
    "id",
    "key",
    "__key__",
)
_SIDES = (
    ("image/height", "height", "rows"),
    ("image/width", "width", "cols"),
    ("image/channels", "channels", "image/depth", "depth"),
)
_ENCODED = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")  # JPEG, PNG
_CONTROL = re.compile(r"[\x00-\x1f]")


class _Chosen(NamedTuple):
    """The names of the features that are read."""

    image: str
    label: str | None
    name: str | None


class TFRecordSource:
    """Images in a TFRecord file, each in a tf.train.Example with its label.

    IMAGES, LABELS and NAMES are the features to look for, in this order, in the first record.
    An image is a file in one bytes value; or pixels, uint8, with features for height, width and channels.
    A label is one number, unchanged (ImageNet's files count from 1), or one text; texts that are all
    numbers are numbers. See `named_labels` for the names of numbered classes.
    All records are read once, and offsets, labels and names are kept beside the file.
    """

    def __init__(self, path: Path, *, labelled: bool = True) -> None:
        try:
            kind = "tfrecord 1" if labelled else "tfrecord 1 without labels"
            kept = stored_index(path, lambda: _index(path, labelled=labelled), kind=kind)
            self._reader = TFRecordReader(path, kept["offsets"].tolist())
            self._spans, self._shapes, self._names = kept["spans"], kept["shapes"], kept["names"]
            labels: Sequence[int | str] = kept["labels"].tolist()
            if kept["labels"].dtype == np.uint8:
                labels = numbers_or_words(split_texts(kept["labels"]), self.describe)
            self.classes, self.labels = named_labels(labels, path, self.describe, labelled=labelled)
            self.fingerprint = file_fingerprint(path, f"{self.names} {labels} {self.classes}")
        except TFRecordError as error:
            problem = str(error).partition("; if it is compressed")[0]
            raise DamagedData(f"{problem}\nCopy or make it again") from error
        except OSError as error:
            raise unreadable(path, error) from error

    @property
    def names(self) -> Sequence[str]:
        return split_texts(self._names) if len(self._names) else list(map(str, range(len(self))))

    def __len__(self) -> int:
        return len(self._reader)

    def describe(self, index: int) -> str:
        return _describe(self._reader, index)

    def read(self, index: int) -> Stored:
        try:
            record = self._reader[index]
        except TFRecordError as error:
            raise OSError(str(error)) from error
        start, end = self._spans[index].tolist()
        if not self._shapes[index].any():
            return record[start:end]
        return np.frombuffer(record[start:end], np.uint8).reshape(self._shapes[index])


def _describe(reader: TFRecordReader, index: int) -> str:
    return f"{reader.path}, record {index} (byte {reader.offsets[index]})"


def _index(path: Path, *, labelled: bool) -> Arrays:
    """The content of `stored_index`: offsets of records; spans and shapes of images; labels, names."""
    chosen = None
    labels: list[int | str] = []
    names: list[str | None] = []
    spans: list[tuple[int, ...]] = []
    with TFRecordReader(path) as reader:
        for number, record in enumerate(reader):
            where = _describe(reader, number)
            features = _parse(record, where)
            chosen = chosen or _choose(features, where, labelled=labelled)
            labels.append(0 if chosen.label is None else _label(features, chosen.label, where))
            if isinstance(labels[-1], str) != isinstance(labels[0], str):
                raise InputError(
                    f"{where}: label {labels[-1]!r}, and {labels[0]!r} in the first record\n"
                    "A label is a number in all records, or text in all"
                )
            names.append(_name(features, chosen.name))
            image = _image(features, chosen.image, where)
            start = record.find(image)  # any occurrence of the same bytes is the same image
            spans.append((start, start + len(image), *pixel_shape(features, image)))
        offsets = np.array(reader.offsets, np.uint64)
    table = np.array(spans, np.int64).reshape(-1, 5)
    known = [name for name in names if name is not None]
    return {
        "offsets": offsets,
        "spans": table[:, :2],
        "shapes": table[:, 2:].astype(np.int32),
        "labels": _stored(labels),
        # A repeated name, such as 0.png of two classes, identifies nothing; then records are numbered.
        "names": joined(known if len(set(known)) == len(names) else []),
    }


def _parse(record: bytes, where: str) -> Features:
    try:
        return parse_example(record)
    except ValueError as error:
        raise InputError(
            f"{where}: {error}\nExpected a tf.train.Example with an image and a label in each record"
        ) from error


def _choose(features: Features, where: str, *, labelled: bool) -> _Chosen:
    images = [name for name in IMAGES if len(_bytes(features, name)) == 1]
    labels = [name for name in LABELS if len(features.get(name, ())) == 1]
    names = [name for name in NAMES if _name(features, name) is not None]
    for what, present, expected in (("image", images, IMAGES), ("label", labels, LABELS)):
        if not present and (labelled or what == "image"):
            raise InputError(
                f"{where} has no {what} that is known; its features: {_outline(features)}\n"
                f"Expected one value in one of {', '.join(expected)}"
            )
    return _Chosen(images[0], labels[0] if labelled else None, names[0] if names else None)


def _bytes(features: Features, name: str) -> list[bytes]:
    values = features.get(name, [])
    return values if isinstance(values, list) else []


def _image(features: Features, name: str, where: str) -> bytes:
    values = _bytes(features, name)
    if len(values) != 1:
        raise InputError(
            f"{where} has no image in {name}; its features: {_outline(features)}\n"
            "Expected one image in each record, in the feature that the first record has it in"
        )
    return values[0]


def _label(features: Features, name: str, where: str) -> int | str:
    values = features.get(name, [])
    if len(values) != 1:
        raise InputError(
            f"{where} has {len(values)} labels in {name}; its features: {_outline(features)}\n"
            "A classifier needs one label per record, in the feature that the first record has it in"
        )
    if isinstance(values, Tensor):
        number = values[0].item()
        if isinstance(number, float) and not (number.is_integer() and abs(number) <= 1 << 24):
            raise InputError(
                f"{where}: label {number:g}\nA label is the number of a class: 0, 1, 2"
            )
        return int(number)
    try:
        text = values[0].decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: label {values[0][:40]!r} is not UTF-8 text") from error
    if not text or _CONTROL.search(text):
        raise InputError(f"{where}: label {text[:40]!r} is no name of a class")
    return text


def _name(features: Features, name: str | None) -> str | None:
    values = features.get(name or "", [])
    if len(values) != 1:
        return None
    if isinstance(values, Tensor):
        return None if values.is_floating_point() else str(values.item())
    text = values[0].decode(errors="surrogateescape")
    return None if not text or _CONTROL.search(text) else text


def pixel_shape(features: Features, image: bytes) -> tuple[int, int, int]:
    """Height, width and channels of pixels; zeros for an image file."""
    sides = [
        next((int(features[name][0]) for name in names if _is_number(features, name)), 0)
        for names in _SIDES
    ]
    height, width, channels = sides
    if height <= 0 or width <= 0 or image.startswith(_ENCODED):
        return 0, 0, 0
    channels = channels or len(image) // (height * width)
    if channels not in (1, 3, 4) or height * width * channels != len(image):
        return 0, 0, 0
    return height, width, channels


def _is_number(features: Features, name: str) -> bool:
    values = features.get(name)
    return isinstance(values, Tensor) and len(values) == 1 and not values.is_floating_point()


def _outline(features: Features) -> str:
    """The features of a record, for a message."""
    words = []
    for name, values in sorted(features.items()):
        kind = "bytes"
        if isinstance(values, Tensor):
            kind = "float" if values.is_floating_point() else "int"
        words.append(f"{name!r} ({len(values)} {kind})")
    return ", ".join([*words[:12], "..."] if len(words) > 12 else words) or "none"


def _stored(labels: Sequence[int | str]) -> NDArray[np.uint8] | NDArray[np.int64]:
    if labels and isinstance(labels[0], str):
        return joined([str(label) for label in labels])
    return np.array(labels, np.int64)
