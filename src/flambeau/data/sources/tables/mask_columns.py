"""Tables with a column of masks beside that of images, as Hugging Face writes data sets of segmentation."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flambeau.data.sources.class_names_file import classes_file
from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.masks.mask_classes import names_in
from flambeau.data.sources.masks.masked_source import MaskedSource, Masks
from flambeau.data.sources.source import Source
from flambeau.data.sources.tables.columns import (
    IMAGES,
    LABELS,
    column_named,
    features_of,
    image_columns,
)
from flambeau.data.sources.targets import TargetChoice, named_column
from flambeau.errors import InputError
from flambeau.optional_packages import extra

# In lower case; if a table has several, the first here is used.
_MASKS = (
    "mask",
    "masks",
    "annotation",
    "annotations",
    "segmentation",
    "segmentation_mask",
    "semantic_mask",
    "label_map",
    "label",
    "labels",
)


class ReadTable(Source, Protocol):
    """A table that is read; see `left_out` and `ArrowSource`."""

    left_out: tuple[LeftOut, ...]
    column: str


class MaskColumns(NamedTuple):
    image: str
    mask: str


def mask_columns(schema: Any, path: Path, choice: TargetChoice) -> MaskColumns | None:
    """The columns of a table for segmentation; None if it is for another task.

    Unless the user names the task, a column of labels makes it a table of labels.
    """
    if choice.task not in (None, "segmentation"):
        return None
    pa = extra("pyarrow", what=f"{path}")
    features = features_of(schema.metadata or {}, path)
    types = {field.name: field.type for field in schema}
    files = image_columns(pa, types, features)
    wished = choice.columns[0] if choice.columns and not choice.of_others else None
    if wished is not None and choice.task is None and wished not in files:
        return None
    if wished is None:
        mask = column_named(files, _MASKS)
    else:
        mask = files[named_column(wished, files, f"{path} has")]
    images = [name for name in files if name != mask]
    image = images[0] if len(images) == 1 else column_named(images, IMAGES)
    is_of_labels = column_named([name for name in types if name not in files], LABELS) is not None
    has_classes = any(one.get("_type") == "ClassLabel" for one in features.values())
    if choice.task is None and (is_of_labels or has_classes or image is None):
        return None
    if mask is None or image is None:
        if choice.task is None:
            return None
        raise InputError(
            f"{path} has no column of masks beside one of images (columns of files: "
            f"{', '.join(files) or 'none'})\nCall one mask, or name it: --target COLUMN"
        )
    return MaskColumns(image, mask)


def _described(files: Source, column: str, index: int) -> str:
    return f"{files.describe(index)}, column {column}"


def masked_table(
    path: Path, columns: MaskColumns, choice: TargetChoice, opened: Callable[[str], ReadTable]
) -> MaskedSource:
    """The images and masks of a table; `opened` opens one column of files."""
    images = opened(columns.image)
    [unread] = images.left_out
    others = tuple(name for name in unread.columns if name != columns.mask)
    images.left_out = (LeftOut(str(path), columns=others),)
    files = opened(columns.mask)
    names_file = classes_file(path)
    named = names_in(names_file) if names_file.is_file() else None
    masks = Masks(
        read=files.read,
        describe=functools.partial(_described, files, columns.mask),
        fingerprint=files.fingerprint,
        index=path,
        named=named,
        column=files.column,
    )
    return MaskedSource(images, masks, choice)
