"""What a packed file says of targets that are no classes, so that they are read as they were written.

A .rec has no place but `id2` of a record's header, which is 0 by custom; tables have their metadata, and
TFRecord and tar files a value in each sample.

K: labels, or numbers.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from flambeau.data.sources.target_names import TASKS, TaskName
from flambeau.errors import DamagedData, json_object

_MARKS: dict[TaskName, str] = {"multilabel": "label", "regression": "number"}
_MARK_BYTES = 8
_KEY = b"flambeau"
_MOST_BYTES = 1 << 24  # of the metadata


class TargetHead(NamedTuple):
    """What all targets of a file have in common.

    Attributes:
        names: of classes, labels, or columns of numbers; empty if the file does not say.
        separator: between the labels of a cell; None: each label has a column of its own.
    """

    task: TaskName
    names: tuple[str, ...] = ()
    separator: str | None = None

    @property
    def has_vectors(self) -> bool:
        return self.task in _MARKS


def as_mark(head: TargetHead) -> int:
    """A header's `id2` as text: 0 of a class, `number`, or `label` and its separator."""
    word = _MARKS.get(head.task, "")
    end = (head.separator or "").encode()
    if len(word) + len(end) > _MARK_BYTES:
        end = b"|"  # of a longer one the reader learns that there is one
    return int.from_bytes(word.encode() + end, "little") if word else 0


def of_mark(mark: int) -> TargetHead | None:
    """The inverse of `as_mark`; None for a class, and for numbers of others."""
    text = mark.to_bytes(_MARK_BYTES, "little").rstrip(b"\0").decode(errors="replace")
    if "\ufffd" in text:
        return None
    for task, word in _MARKS.items():
        if text.startswith(word) and (task == "multilabel" or text == word):
            return TargetHead(task, separator=text.removeprefix(word) or None)
    return None


def of_words(task: str, separator: str) -> TargetHead | None:
    """A head of two texts; None if the task is none that has vectors."""
    name = next((name for name in _MARKS if name == task), None)
    return None if name is None else TargetHead(name, separator=separator or None)


def as_metadata(head: TargetHead) -> dict[bytes, bytes]:
    """The metadata of a table's schema."""
    return {_KEY: json.dumps(head._asdict(), ensure_ascii=False).encode()}


def of_metadata(metadata: Mapping[bytes, bytes] | None, path: Path) -> TargetHead | None:
    """The inverse of `as_metadata`; None if there is none. DamagedData: it is no such text."""
    data = (metadata or {}).get(_KEY)
    if data is None:
        return None
    try:
        if len(data) > _MOST_BYTES:
            raise ValueError("too long")
        facts = json.loads(data, object_pairs_hook=json_object)
        names = facts["names"]
        separator = facts["separator"]
        fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not (fits and names and len({*names}) == len(names) and facts["task"] in TASKS):
            raise ValueError("no targets")
        if not (separator is None or (isinstance(separator, str) and separator)):
            raise ValueError("no separator")
        return TargetHead(facts["task"], tuple(names), separator)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedData(
            f"{path}: its metadata 'flambeau' are no targets: {type(error).__name__}\n"
            "Copy or make it again"
        ) from error


def mask_text(mask: bytes) -> str:
    """What a checksum covers of a mask, given as its file."""
    return f"mask {zlib.crc32(mask):08x}"


def vector_text(vector: Tensor) -> str:
    """The values of a label vector, of which a checksum is made."""
    return " ".join(f"{value:.9g}" for value in vector.flatten().tolist())
