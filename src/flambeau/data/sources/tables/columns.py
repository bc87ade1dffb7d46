"""The columns of a table that hold the images and their labels.

The key `huggingface` of a schema's metadata, which holds the features as JSON, and the struct of
bytes and path are those of Hugging Face datasets 5.2 (`datasets.Image`, `datasets.ClassLabel`).
"""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flambeau.errors import DamagedData, InputError
from flambeau.optional_packages import extra

# In lower case; if a table has several, the first here is used.
IMAGES = ("image", "img", "images", "jpg", "jpeg", "png", "webp", "image_bytes", "encoded")
LABELS = (
    "label",
    "labels",
    "class",
    "class_id",
    "cls",
    "target",
    "category",
    "fine_label",
    "class_name",
)
NAMES_OF_FILES = (
    "path",
    "filepath",
    "file_path",
    "file",
    "filename",
    "file_name",
    "image",
    "image_path",
    "image_file",
    "image_name",
    "img",
    "img_path",
    "url",
    "image_url",
)
"""Columns of text that name image files, as `listing` reads them in a .csv."""

_SHOWN = 8  # columns that a message names
_USER_FUNCTION = "Rename one, or return the images from a function of your own: FILE.py:FUNCTION"


class NamesFiles(InputError):
    """A table that names image files instead of holding them."""


class Columns(NamedTuple):
    """The columns to read; `is_struct`: images are structs of bytes and path."""

    image: str
    is_struct: bool
    label: str | None
    classes: tuple[str, ...] | None
    unread: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        return [self.image] if self.label is None else [self.image, self.label]


def image_column(schema: Any, path: Path) -> str:
    """The column of images, as `choose_columns` finds it."""
    pa = extra("pyarrow", what=f"{path}")
    types = {field.name: field.type for field in schema}
    return _image(pa, types, features_of(schema.metadata or {}, path), path)


def other_columns(schema: Any, path: Path) -> list[str]:
    """The columns that hold no image files."""
    pa = extra("pyarrow", what=f"{path}")
    types = {field.name: field.type for field in schema}
    files = image_columns(pa, types, features_of(schema.metadata or {}, path))
    return [name for name in types if name not in files]


def choose_columns(
    schema: Any, path: Path, *, labelled: bool = True, image: str | None = None
) -> Columns:
    """The columns of images and labels.

    The image is the one column of the feature Image, else the one struct with `bytes`, else the one column of
    bytes, and of several that with a usual name (`image`, `img`, ...); the label is a column with a usual
    name, else the one of the feature ClassLabel.
    """
    try:
        return _chosen(schema, path, labelled, image)
    except UnicodeDecodeError as error:
        raise DamagedData(
            f"{path}: a name in its schema is no text\nCopy or make it again"
        ) from error


def _chosen(schema: Any, path: Path, labelled: bool, image: str | None) -> Columns:
    pa = extra("pyarrow", what=f"{path}")
    features = features_of(schema.metadata or {}, path)
    types = {field.name: field.type for field in schema}
    if len(types) < len(schema):
        raise InputError(f"{path} has two columns of one name\nRename one of them")
    image = image or _image(pa, types, features, path)
    kind = types[image]
    is_struct = pa.types.is_struct(kind)
    parts = {part.name: part.type for part in kind} if is_struct else {"bytes": kind}
    files = parts["bytes"]
    if not (pa.types.is_binary(files) or pa.types.is_large_binary(files)):
        raise InputError(f"{path}: column {image!r} holds {files}\nExpected binary: image files")
    label = _label(pa, types, features, path) if labelled else None
    classes = None if label is None else _names(features.get(label, {}), label, path)
    unread = tuple(name for name in types if name not in (image, label))
    return Columns(image, is_struct, label, classes, unread)


def features_of(metadata: Mapping[bytes, bytes], path: Path) -> dict[str, dict[str, Any]]:
    """Hugging Face's description of each column; empty if it did not write the table."""
    if b"huggingface" not in metadata:
        return {}
    try:
        features = json.loads(metadata[b"huggingface"])["info"]["features"]
        return {name: what for name, what in dict(features).items() if isinstance(what, dict)}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedData(
            f"{path}: its metadata 'huggingface' are no features: {type(error).__name__}\n"
            "Copy or make it again"
        ) from error


def image_columns(pa: Any, types: Mapping[str, Any], features: Mapping[str, Any]) -> list[str]:
    """The columns that hold image files, by the rules of `choose_columns`."""

    def is_struct(kind: Any) -> bool:
        return bool(pa.types.is_struct(kind)) and kind.get_field_index("bytes") >= 0

    declared = [name for name in types if features.get(name, {}).get("_type") == "Image"]
    structs = [name for name, kind in types.items() if is_struct(kind)]
    binary = pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view
    files = [name for name, kind in types.items() if any(is_it(kind) for is_it in binary)]
    return [name for name in declared if name in {*structs, *files}] or structs or files


def _image(pa: Any, types: Mapping[str, Any], features: Mapping[str, Any], path: Path) -> str:
    candidates = image_columns(pa, types, features)
    if not candidates:
        strings = pa.types.is_string, pa.types.is_large_string
        texts = [name for name, kind in types.items() if any(is_it(kind) for is_it in strings)]
        if path.suffix.lower() == ".parquet" and column_named(texts, NAMES_OF_FILES) is not None:
            raise NamesFiles(
                f"{path} names image files, and does not hold them (found: {_outline(types)})\n"
                f"Write it as a .csv of these columns, and name that: {_as_csv(path)}"
            )
        raise InputError(
            f"{path} has no column of images (found: {_outline(types)})\n"
            "Expected image files, as binary or as struct<bytes, path> as Hugging Face writes them"
        )
    known = column_named(candidates, IMAGES)
    if len(candidates) > 1 and known is None:
        raise InputError(
            f"{path} has several columns of images: {', '.join(candidates[:_SHOWN])}\n"
            f"Call the one that counts {IMAGES[0]!r}. {_USER_FUNCTION}"
        )
    return candidates[0] if len(candidates) == 1 or known is None else known


def _label(pa: Any, types: Mapping[str, Any], features: Mapping[str, Any], path: Path) -> str:
    declared = [name for name in types if features.get(name, {}).get("_type") == "ClassLabel"]
    label = column_named(types, LABELS) or (declared[0] if len(declared) == 1 else None)
    if label is None and declared:
        raise InputError(
            f"{path} has several columns of labels: {', '.join(declared[:_SHOWN])}\n"
            f"Call the one that counts {LABELS[0]!r}. {_USER_FUNCTION}"
        )
    if label is None:
        raise InputError(
            f"{path} has no column of labels (found: {_outline(types)})\n"
            f"Expected one called {', '.join(LABELS[:4])} ..., or one of the feature ClassLabel"
        )
    kind = types[label]
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    fits = pa.types.is_integer, pa.types.is_boolean, pa.types.is_string, pa.types.is_large_string
    if not any(is_it(kind) for is_it in fits):
        raise InputError(
            f"{path}: column {label!r} holds {kind!s:.60}\n"
            "A label is the number of a class, as an integer, or its name, as a string"
        )
    return label


def _names(feature: Mapping[str, Any], label: str, path: Path) -> tuple[str, ...] | None:
    names = feature.get("names") if feature.get("_type") == "ClassLabel" else None
    if names is None:
        return None
    if not (isinstance(names, list) and names and all(isinstance(name, str) for name in names)):
        raise DamagedData(
            f"{path}: the class names of {label!r} are no list of words\nMake it again"
        )
    return tuple(names)


def column_named(columns: Iterable[str], known: Sequence[str]) -> str | None:
    """The column named first among known ones, in any case, if any."""
    by_lower = {name.lower(): name for name in columns}
    return next((by_lower[word] for word in known if word in by_lower), None)


def _outline(types: Mapping[str, Any]) -> str:
    words = [f"{name} {kind!s:.40}" for name, kind in list(types.items())[:_SHOWN]]
    return ", ".join(words) + ", ..." * (len(types) > _SHOWN)


def _as_csv(path: Path) -> str:
    """The command that writes a Parquet file as text beside it."""
    code = (
        "from pyarrow import csv, parquet; "
        f"csv.write_csv(parquet.read_table({str(path)!r}), {str(path.with_suffix('.csv'))!r})"
    )
    return shlex.join(["python", "-c", code])
