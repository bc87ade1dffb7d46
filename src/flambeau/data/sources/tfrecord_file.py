"""Labelled images in a TFRecord file.

The formats are those of flambeau.recipes.data.tfrecord and tf_example. The names of features are
those of TensorFlow's ImageNet scripts (`image/encoded`), TFDS (`image`, `label`), Kaggle's TPU data sets
(`class`, `target`, `image_name`) and common names of files in a sample (`jpg`, `cls`).
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.class_names_file import named_labels
from flambeau.data.sources.fingerprint import file_fingerprint
from flambeau.data.sources.index_cache import Arrays, joined, split_texts, stored_index
from flambeau.data.sources.listing import numbers_or_words
from flambeau.data.sources.packed_targets import of_words
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import FOUND, TargetChoice, named_column
from flambeau.data.sources.vector_targets import (
    Value,
    label_value,
    refuse_separator,
    vector_targets,
)
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
VECTORS = (*LABELS, "labels", "image/labels", "image/class/labels", "targets", "tags")
"""Of these, the first that has several numbers is a label vector, where no label has one value."""
TASK, SEPARATOR = "image/class/task", "image/class/separator"
"""What flambeau writes beside a label vector: its task, and what separates labels in a cell."""
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
    """The features that are read; `labels`: one, or several of a number each; `is_vector`: numbers."""

    image: str
    labels: tuple[str, ...]
    name: str | None
    is_vector: bool = False


class TFRecordSource:
    """Images in a TFRecord file, each in a tf.train.Example with its label.

    The first record decides on the features, of IMAGES, LABELS and NAMES, else VECTORS. An image is a file in
    one bytes value; or pixels, uint8, with features for height, width and channels. A label is one number,
    unchanged (ImageNet's files count from 1), or one text; texts that are all numbers are numbers (see
    `named_labels`). For several numbers, and fractions, see `vector_targets`. All records are read once;
    offsets, labels and names are kept beside the file.
    """

    def __init__(self, path: Path, *, labelled: bool = True, choice: TargetChoice = FOUND) -> None:
        self.task: TaskName = "classification"
        self.separator: str | None = None
        columns = choice.columns if labelled else ()
        try:
            kind = "tfrecord 1" if labelled else "tfrecord 1 without labels"
            kind += f" {columns} {choice.is_wish}" if columns else ""
            kept = stored_index(
                path,
                lambda: _index(path, columns, is_wish=choice.is_wish, labelled=labelled),
                kind=kind,
            )
            self._reader = TFRecordReader(path, kept["offsets"].tolist())
            self._spans, self._shapes, self._names = kept["spans"], kept["shapes"], kept["names"]
            self.image_sizes = np.diff(self._spans.astype(np.int64), axis=1)[:, 0]
            facts = self._other_targets(path, kept, choice) if labelled else None
            if labelled:
                refuse_separator(path, choice, self.separator)
            self.fingerprint = file_fingerprint(
                path, self._class_targets(path, kept, labelled) if facts is None else facts
            )
        except TFRecordError as error:
            problem = str(error).partition("; if it is compressed")[0]
            raise DamagedData(f"{problem}\nCopy or make it again") from error
        except OSError as error:
            raise unreadable(path, error) from error

    def _other_targets(
        self, path: Path, kept: Mapping[str, NDArray[Any]], choice: TargetChoice
    ) -> str | None:
        """Set several labels or numbers, and return what identifies them; None if they are classes."""
        values: list[Value]
        if "table" in kept:
            rows = torch.from_numpy(kept["table"])
            ends = kept["ends"].tolist()
            pairs = zip([0, *ends], ends, strict=False)
            values = [label_value(rows[start:end]) for start, end in pairs]
        elif kept["labels"].dtype == np.uint8:
            if choice.task in (None, "classification"):
                return None
            raise InputError(
                f"{self.describe(0)}: its label is a text, and none of numbers\n"
                f"For {choice.task}, give each record a list of numbers, or name one with --target"
            )
        else:
            values = list(map(float, kept["labels"].tolist()))
        said = of_words(*split_texts(kept["said"])) if "said" in kept else None
        names = split_texts(kept["columns"]) if "columns" in kept else None
        found = vector_targets(values, path, choice, self.describe, said=said, names=names)
        if found is None:
            return None
        self.task, self.classes, self.labels, self.separator = found
        digest = hashlib.sha256(self.labels.numpy().tobytes()).hexdigest()
        return f"{self.names} {found[:2]} {digest} {self.separator}"

    def _class_targets(self, path: Path, kept: Mapping[str, NDArray[Any]], labelled: bool) -> str:
        """Set the classes, and return what identifies them."""
        labels: Sequence[int | str] = kept["labels"].tolist()
        if "table" in kept:
            labels = self._class_numbers(kept["table"], kept["ends"])
        elif kept["labels"].dtype == np.uint8:
            labels = numbers_or_words(split_texts(kept["labels"]), self.describe)
        self.classes, self.labels = named_labels(labels, path, self.describe, labelled=labelled)
        return f"{self.names} {labels} {self.classes}"

    def _class_numbers(self, table: NDArray[Any], ends: NDArray[Any]) -> list[int]:
        """InputError: labels that are no numbers of classes, or several."""
        starts = [0, *ends.tolist()]
        odd = next((at for at, end in enumerate(ends) if end - starts[at] != 1), None)
        if odd is not None:
            raise InputError(
                f"{self.describe(odd)}: {ends[odd] - starts[odd]} labels\n"
                "A classifier needs one label per record; give --task regression if the numbers are to be "
                "learned, or --task multilabel if each is 0 or 1 for a label"
            )
        for at, number in enumerate(table.tolist()):
            if not (float(number).is_integer() and abs(number) <= 1 << 24):
                raise InputError(
                    f"{self.describe(at)}: label {number:g}\nA label is the number of a class: 0, 1, 2; if "
                    "numbers are to be learned, give --task regression"
                )
        return [int(number) for number in table.tolist()]

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


def _index(path: Path, columns: Sequence[str], *, is_wish: bool, labelled: bool) -> Arrays:
    """The content of `stored_index`: offsets of records; spans and shapes of images; labels, names.

    Labels that are not one whole number or text each are in `table`, one behind the other, and end at `ends`.
    """
    chosen = None
    labels: list[int | str | list[float]] = []
    names: list[str | None] = []
    spans: list[tuple[int, ...]] = []
    said = ["", ""]
    with TFRecordReader(path) as reader:
        for number, record in enumerate(reader):
            where = _describe(reader, number)
            features = _parse(record, where)
            if chosen is None:
                chosen = _choose(features, where, columns, is_wish=is_wish, labelled=labelled)
                said = [_word(features, name) for name in (TASK, SEPARATOR)]
            labels.append(_label(features, chosen, where) if chosen.labels else 0)
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
    read = chosen.labels if chosen is not None and {*chosen.labels} <= {*columns} else ()
    return {
        "offsets": offsets,
        "spans": table[:, :2],
        "shapes": table[:, 2:].astype(np.int32),
        # A repeated name, such as 0.png of two classes, identifies nothing; then records are numbered.
        "names": joined(known if len(set(known)) == len(names) else []),
        **_stored(labels),
        **({"said": joined(said)} if said[0] else {}),
        **(
            {"columns": joined(read)}
            if len(labels) and read and _num(labels[0]) == len(read)
            else {}
        ),
    }


def _parse(record: bytes, where: str) -> Features:
    try:
        return parse_example(record)
    except ValueError as error:
        raise InputError(
            f"{where}: {error}\nExpected a tf.train.Example with an image and a label in each record"
        ) from error


def _choose(
    features: Features, where: str, columns: Sequence[str], *, is_wish: bool, labelled: bool
) -> _Chosen:
    images = [name for name in IMAGES if len(_bytes(features, name)) == 1]
    names = [name for name in NAMES if _name(features, name) is not None]
    if labelled:
        labels, is_vector = _chosen_labels(features, where, columns, is_wish)
    else:
        labels = ()
        is_vector = False
    for what, present, expected in (("image", images, IMAGES), ("label", labels, LABELS)):
        if not present and (labelled or what == "image"):
            raise InputError(
                f"{where} has no {what} that is known; its features: {_outline(features)}\n"
                f"Expected one value in one of {', '.join(expected)}"
            )
    return _Chosen(images[0], labels, names[0] if names else None, is_vector)


def _chosen_labels(
    features: Features, where: str, columns: Sequence[str], is_wish: bool
) -> tuple[tuple[str, ...], bool]:
    """The features of the labels, and whether they are numbers that may be other targets than classes."""
    if columns and (is_wish or {*columns} <= {*features}):
        wanted = [named_column(name, [*features], f"{where} has") for name in columns]
        labels = tuple([*features][at] for at in wanted)
        return labels, len(labels) > 1 or len(features[labels[0]]) != 1
    if of_words(_word(features, TASK), "") is None:
        single = next((name for name in LABELS if len(features.get(name, ())) == 1), None)
        if single is not None:
            return (single,), False
    has_values = (name for name in VECTORS if len(features.get(name, ())))
    vector = next((name for name in has_values if isinstance(features[name], Tensor)), None)
    return ((), False) if vector is None else ((vector,), True)


def _word(features: Features, name: str) -> str:
    """A short text of a feature; '' if it has none."""
    values = _bytes(features, name)
    text = values[0][:64].decode(errors="replace") if len(values) == 1 else ""
    return "" if "\0" in text else text


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


def _label(features: Features, chosen: _Chosen, where: str) -> int | str | list[float]:
    if chosen.is_vector:
        return [
            value for name in chosen.labels for value in _numbers(features, name, where, chosen)
        ]
    [name] = chosen.labels
    values = features.get(name, [])
    if len(values) != 1:
        raise InputError(
            f"{where} has {len(values)} labels in {name}; its features: {_outline(features)}\n"
            "A classifier needs one label per record, in the feature that the first record has it in"
        )
    if isinstance(values, Tensor):
        number = values[0].item()
        if isinstance(number, float) and not (number.is_integer() and abs(number) <= 1 << 24):
            return [number]
        return int(number)
    try:
        text = values[0].decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: label {values[0][:40]!r} is not UTF-8 text") from error
    if not text or _CONTROL.search(text):
        raise InputError(f"{where}: label {text[:40]!r} is no name of a class")
    return text


def _numbers(features: Features, name: str, where: str, chosen: _Chosen) -> list[float]:
    """The numbers of a feature, one if there are several features."""
    values = features.get(name, [])
    if not isinstance(values, Tensor) or (len(chosen.labels) > 1 and len(values) != 1):
        problem = f"{len(values)} labels" if isinstance(values, Tensor) else "no numbers"
        raise InputError(
            f"{where} has {problem} in {name}; its features: {_outline(features)}\n"
            "Give each record one number in each feature, NaN for one that is unknown"
        )
    return list(values.tolist())


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


def _num(label: int | str | list[float]) -> int:
    return len(label) if isinstance(label, list) else 1


def _stored(labels: Sequence[int | str | list[float]]) -> Arrays:
    if labels and isinstance(labels[0], str):
        return {"labels": joined([str(label) for label in labels])}
    if not any(isinstance(label, list) for label in labels):
        return {"labels": np.array(labels, np.int64)}
    rows = [label if isinstance(label, list) else [float(label)] for label in labels]
    return {
        "labels": np.zeros(0, np.int64),
        "table": np.array([value for row in rows for value in row], np.float64),
        "ends": np.cumsum([len(row) for row in rows]),
    }
