"""All that is known of the samples of a shard without its content: an index, made once, kept as a file.

The sources of local files parse a shard; here is what they have found, with the place, the size and the
CRC-32 of each image, so that a source of the same samples can be made anywhere (see `store_shards`).

N: samples.
"""

import io
import json
import mmap
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.index_cache import joined, split_texts
from flambeau.data.sources.masks.mask_classes import NamedValues
from flambeau.data.sources.masks.masked_source import MaskedSource
from flambeau.data.sources.source import (
    Source,
    SubsetSource,
    left_out,
    left_out_columns,
    parts_of,
    pixel_kind,
)
from flambeau.data.sources.tables.arrow_file import ArrowSource
from flambeau.data.sources.tables.parquet_file import MOST_PACKED, SMALL
from flambeau.data.sources.tables.row_groups import RowGroups, packed_groups
from flambeau.data.sources.target_names import TASKS, TaskName
from flambeau.data.sources.targets import groups_of, separator_of, task_of
from flambeau.data.sources.unpacked_arrays import UnpackedArrays
from flambeau.data.sources.zip_members import MOST_PACKED as MOST_DEFLATED
from flambeau.data.sources.zip_members import SLACK, inflated, packed_places
from flambeau.errors import ZIP_ERRORS, DamagedData, InputError

VERSION = 3
_FORGET_AFTER = 256  # shards that are checked
_NEAR = 1 << 22  # bytes behind an image in which the next one begins, nearly always
_MAX_SIDE = 1 << 20
_MAX_BYTES = 1 << 48
_HERE = "\x01"  # stands for the shard in messages about masks
_PARTS = ("train", "val", "test", "")
_LONGEST_AROUND = 1 << 10


class Texts(Sequence[str]):
    """Texts out of one array, each followed by a zero.

    Args:
        around: what begins and ends each, outside of the array.
    """

    def __init__(self, data: NDArray[np.uint8], around: tuple[str, str] = ("", "")) -> None:
        self._data = data
        self._before, self._after = around
        self._ends: NDArray[np.uint32] | NDArray[np.int64] | None = None

    def _positions(self) -> NDArray[np.uint32] | NDArray[np.int64]:
        if self._ends is None:
            ends = np.flatnonzero(self._data == 0)
            self._ends = ends.astype(np.uint32) if len(self._data) < 1 << 32 else ends
        return self._ends

    def __len__(self) -> int:
        # The places of millions of texts, which few ask for, would be as large as many of these.
        return int(np.count_nonzero(self._data == 0)) if self._ends is None else len(self._ends)

    def __iter__(self) -> Iterator[str]:
        return (self._before + text + self._after for text in split_texts(self._data))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        ends = self._positions()
        at = range(len(ends))[index]
        start = int(ends[at - 1]) + 1 if at else 0
        text = self._data[start : int(ends[at])].tobytes().decode(errors="surrogateescape")
        return self._before + text + self._after

    @property
    def array(self) -> NDArray[np.uint8]:
        return joined(self) if self._before or self._after else self._data

    def around(self, others: "Texts") -> tuple[str, str] | None:
        """What stands before and behind each of the others to make these texts, if so."""
        if not len(self) or len(self) != len(others):
            return None
        before, found, after = str(self[0]).partition(others[0])
        same = (text == before + other + after for text, other in zip(self, others, strict=True))
        return (before, after) if found and all(same) else None


@dataclass(frozen=True)
class Places:
    """Where a file of each sample lies in the shard: its image, or its mask.

    Attributes:
        tails: what follows the shard's name in messages about the file.
        offsets, sizes: (N,) int64; the size is -1 of unreadable files.
        crcs: (N,) uint32.
        inline: the files that are no run of bytes of the shard, by number.
        packed: (N,) int64, bytes of a compressed file (a zip's deflate), else 0; None if none is.
    """

    tails: Texts
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    inline: dict[int, bytes]
    packed: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class MaskPart:
    """The masks of a shard's images, as `masks.masked_source` finds them.

    Attributes:
        fingerprint: of all masks.
        named: the names of their numbers; `whose` is the file that says them.
        counts: (N, 256) uint32, pixels of each number.
        problems: what is wrong with some masks, by number.
    """

    places: Places
    fingerprint: str
    named: NamedValues | None
    counts: NDArray[np.uint32]
    problems: dict[int, str]

    def problems_at(self, address: str) -> dict[int, str]:
        """As `problems`, in the words of who names the shard by its address."""
        return {at: text.replace(_HERE, address) for at, text in self.problems.items()}


@dataclass(frozen=True)
class ShardPart:
    """The samples of a shard to train on, or to validate on; nearly always there is one part.

    Attributes:
        fingerprint: of the source of the local file.
        labels: (N,) int64 or (N, K) float32.
        shapes: (N, 3) int32, zeros for files of images; None if all are such.
        left_out: unread files beside the images, by ending.
        columns: of a table that are not read.
        rows: where images lie within a Parquet file's row groups, which are unpacked as a whole.
        masks: for segmentation; task, classes and labels then have no meaning.
        groups, parts: of each sample, if a table says them, or the folders in a tar with masks.
    """

    task: TaskName
    separator: str | None
    classes: tuple[str, ...]
    fingerprint: str
    names: Texts
    labels: Tensor
    images: Places
    shapes: NDArray[np.int32] | None
    left_out: dict[str, int]
    columns: tuple[str, ...] = ()
    rows: RowGroups | None = None
    masks: MaskPart | None = None
    groups: Texts | None = None
    parts: Texts | None = None

    def __len__(self) -> int:
        return len(self.images)

    @property
    def target_task(self) -> TaskName:
        return self.task if self.masks is None else "segmentation"


@dataclass(frozen=True)
class ShardIndex:
    """One shard: its name, its size in bytes, and its parts."""

    name: str
    size: int
    parts: tuple[ShardPart, ...]


def index_shard(path: Path, opened: tuple[Source, Source | None], *, where: str) -> ShardIndex:
    """The index of a local file, called `where` in messages, as its sources were opened."""
    whole = _unsplit(opened)
    if whole is not None:
        source, texts = whole
        parts: tuple[ShardPart, ...] = (_part(path, source, where, texts),)
    else:
        parts = tuple(
            _part(path, source, where, parts_of(source)) for source in opened if source is not None
        )
    return ShardIndex(path.name, path.stat().st_size, parts)


def _unsplit(opened: tuple[Source, Source | None]) -> tuple[MaskedSource, list[str]] | None:
    """The images and masks of both parts of a tar, and which part each is of."""
    train, val = opened
    if not isinstance(train, SubsetSource) or not isinstance(val, SubsetSource):
        return None
    [whole] = train.made_of
    if not isinstance(whole, MaskedSource) or val.made_of[0] is not whole:
        return None
    parts = [""] * len(whole)
    for name, part in (("train", train), ("val", val)):
        for index in part.indices.tolist():
            parts[index] = name
    return whole, parts


def _part(path: Path, source: Source, where: str, parts: Sequence[str] | None) -> ShardPart:
    # The files are of any depth: what their pixels become is decided where they are read.
    assert pixel_kind(source) == "uint8", where
    # As a source names its file: a relative path stays one in some of them.
    start = re.compile("|".join(map(re.escape, (str(path.absolute()), str(path)))))
    masked = source if isinstance(source, MaskedSource) else None
    images = source if masked is None else masked.images
    groups = groups_of(source)
    rows, found = _spans(path, images, masked)
    shapes = np.array([span.shape for span in found[0]], np.int32).reshape(-1, 3)
    masks = None
    if masked is not None:
        named = masked.masks.named
        masks = MaskPart(
            places=_places(start, found[1], masked.describe_mask),
            fingerprint=masked.masks.fingerprint,
            named=None if named is None else named._replace(whose=Path(named.whose).name),
            counts=masked.counts,
            problems={at: start.sub(_HERE, text) for at, text in masked.problems.items()},
        )
    return ShardPart(
        task=task_of(images),
        separator=separator_of(images),
        classes=tuple(images.classes),
        fingerprint=images.fingerprint,
        names=Texts(joined(images.names)),
        labels=images.labels,
        images=_places(start, found[0], images.describe),
        shapes=shapes if shapes.any() else None,
        left_out=dict(sum((one.counts for one in left_out(source)), Counter[str]())),
        columns=tuple(left_out_columns(source)),
        rows=rows,
        masks=masks,
        groups=None if groups is None else Texts(joined(groups)),
        parts=None if parts is None else Texts(joined(parts)),
    )


def content_of(
    path: Path, opened: tuple[Source, Source | None], part: ShardPart
) -> Callable[[int, int], bytes]:
    """What reads the files of a newly indexed part: by sample, and 0 for images, 1 for masks."""
    if part.rows is not None:
        source = opened[0]
        reads: list[Callable[[int], Any]] = [source.read]
        if isinstance(source, MaskedSource):
            reads = [source.images.read, source.masks.read]
        return lambda index, column: bytes(reads[column](index))
    places = [part.images, *([] if part.masks is None else [part.masks.places])]
    content = memoryview(path.read_bytes())

    def cut_out(index: int, column: int) -> bytes:
        there = places[column]
        start = int(there.offsets[index])
        size = int(there.sizes[index])
        packed = 0 if there.packed is None else int(there.packed[index])
        data = content[start : start + (packed or size)]
        return inflated(data, size) if packed else bytes(data)

    return cut_out


@dataclass(frozen=True)
class _Span:
    """Place, size, CRC-32, shape and, where it is no run of bytes of the file, the bytes of an image.

    `packed`: the bytes that it takes, if it is compressed.
    """

    start: int
    size: int
    crc: int
    shape: tuple[int, ...] = (0, 0, 0)
    inline: bytes | None = None
    packed: int = 0


def _places(
    start: re.Pattern[str], spans: Sequence[_Span], describe: Callable[[int], str]
) -> Places:
    packed = np.array([span.packed for span in spans], np.int64)
    return Places(
        tails=Texts(joined(start.sub("", describe(at), count=1) for at in range(len(spans)))),
        offsets=np.array([span.start for span in spans], np.int64),
        sizes=np.array([span.size for span in spans], np.int64),
        crcs=np.array([span.crc for span in spans], np.uint32),
        inline={at: span.inline for at, span in enumerate(spans) if span.inline is not None},
        packed=packed if packed.any() else None,
    )


def _spans(
    path: Path, images: Source, masked: MaskedSource | None
) -> tuple[RowGroups | None, list[list[_Span]]]:
    """The places of images, and of masks."""
    reads: list[Callable[[int], Any]] = [images.read]
    if masked is not None:
        reads.append(masked.masks.read)
    if isinstance(images, ArrowSource) and images.is_copied:
        columns = [images.column]
        if masked is not None:
            columns.append(masked.masks.column)
        rows = packed_groups(path, tuple(columns))
        return rows, [[_whole(read, at) for at in range(len(images))] for read in reads]
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        packed = packed_places(path) if path.suffix.lower() == ".zip" else {}
        return None, [_found(content, read, len(images), packed) for read in reads]


def _stored(read: Callable[[int], Any], index: int) -> tuple[bytes, tuple[int, ...]] | None:
    """The bytes of an image, and the shape of an array; None for a bad one, named when it is read."""
    try:
        stored = read(index)
    except OSError:
        return None
    if isinstance(stored, bytes):
        return stored, (0, 0, 0)
    array = np.ascontiguousarray(stored)
    return array.tobytes(), array.shape


def _whole(read: Callable[[int], Any], index: int) -> _Span:
    stored = _stored(read, index)
    return _Span(0, -1, 0) if stored is None else _Span(0, len(stored[0]), zlib.crc32(stored[0]))


def _found(
    content: mmap.mmap,
    read: Callable[[int], Any],
    count: int,
    packed: Mapping[tuple[int, int], tuple[int, int]],
) -> list[_Span]:
    """The places of images in a file.

    Whoever reads the format has the bytes of an image, and any place with the same bytes is as good as its
    own: so nothing needs to know here how a format is laid out.

    Args:
        packed: offset and size of those that are compressed, by their own size and CRC-32.
    """
    spans = []
    at = 0
    for index in range(count):
        stored = _stored(read, index)
        if stored is None:
            spans.append(_Span(0, -1, 0))
            continue
        data, shape = stored
        facts = len(data), zlib.crc32(data)
        if facts in packed:
            start, size = packed[facts]
            spans.append(_Span(start, *facts, packed=size))
            continue
        found = content.find(data, at, at + len(data) + _NEAR)
        found = content.find(data) if found < 0 else found
        if found < 0:
            spans.append(_Span(0, 0, facts[1], shape, data))
            continue
        at = found + len(data)
        spans.append(_Span(found, *facts, shape))
    return spans


# ---------------------------------------------------------------- as a file

_KINDS: dict[str, Any] = {
    "names": np.uint8,
    "tails": np.uint8,
    "offsets": np.int64,
    "sizes": np.int64,
    "crcs": np.uint32,
    "shapes": np.int32,
    "inline": np.uint8,
    "packed": np.int64,
    "texts": np.uint8,
    "rows": np.int64,
    "counts": np.uint32,
}
"""The arrays of an index beside its head and its labels; those of all parts are joined."""


def write_index(shards: Sequence[ShardIndex]) -> bytes:
    """The content of a file: a .npz without objects."""
    return _Writing().content(shards)


class _Writing:
    """Collects the arrays of an index, in the order in which `_Reading` takes them."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[NDArray[Any]]] = {name: [] for name in (*_KINDS, "labels")}
        self._classes: dict[tuple[str, ...], int] = {}

    def content(self, shards: Sequence[ShardIndex]) -> bytes:
        facts = [
            {"name": one.name, "size": one.size, "parts": [self._part(part) for part in one.parts]}
            for one in shards
        ]
        classes = [list(names) for names in self._classes]
        head = {"version": VERSION, "classes": classes, "shards": facts}
        arrays: dict[str, Any] = {
            name: np.concatenate(pieces) if pieces else np.zeros(0, _KINDS.get(name))
            for name, pieces in self._pieces.items()
        }
        file = io.BytesIO()
        head_bytes = np.frombuffer(json.dumps(head).encode(), np.uint8)
        np.savez_compressed(file, head=head_bytes, **arrays)
        return file.getvalue()

    def _add(self, name: str, array: NDArray[Any]) -> int:
        self._pieces[name].append(array)
        return len(array)

    def _part(self, part: ShardPart) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "samples": len(part),
            "task": part.task,
            "separator": part.separator,
            "classes": self._classes.setdefault(part.classes, len(self._classes)),
            "fingerprint": part.fingerprint,
            "names": self._add("names", part.names.array),
            "left_out": part.left_out,
            "columns": list(part.columns),
            "has_shapes": part.shapes is not None,
            **self._places(part.images, part.names),
        }
        self._add("labels", part.labels.numpy())
        if part.shapes is not None:
            self._add("shapes", part.shapes)
        if part.rows is not None:
            facts["rows"] = {
                "columns": list(part.rows.columns),
                "groups": self._add("rows", part.rows.lengths),
                "footer": [part.rows.footer_start, part.rows.footer_size],
                "crc": part.rows.footer_crc,
            }
        for name, texts in (("groups", part.groups), ("parts", part.parts)):
            if texts is not None:
                facts[name] = self._add("texts", texts.array)
        if part.masks is not None:
            facts["masks"] = self._masks(part.masks, part.names)
        return facts

    def _places(self, places: Places, names: Texts) -> dict[str, Any]:
        for name in ("offsets", "sizes", "crcs"):
            self._add(name, getattr(places, name))
        for data in places.inline.values():
            self._add("inline", np.frombuffer(data, np.uint8))
        if places.packed is not None:
            self._add("packed", places.packed)
        around = places.tails.around(names)
        return {
            "tails": around or self._add("tails", places.tails.array),
            "inline": {str(at): len(data) for at, data in places.inline.items()},
            **({} if places.packed is None else {"packed": True}),
        }

    def _masks(self, masks: MaskPart, names: Texts) -> dict[str, Any]:
        named = masks.named
        images, values = masks.counts.nonzero()
        counts = np.stack([images, values, masks.counts[images, values]], axis=1)
        return {
            "fingerprint": masks.fingerprint,
            "named": None if named is None else [sorted(named.names.items()), named.whose],
            "problems": {str(at): text for at, text in masks.problems.items()},
            "counts": self._add("counts", counts.astype(np.uint32)),
            **self._places(masks.places, names),
        }


def read_index(data: bytes, where: str, *, scratch: Path | None = None) -> list[ShardIndex]:
    """The inverse of `write_index`; nothing is believed before it is checked.

    Args:
        scratch: a folder on disk, where what is large is kept in a file without a name.

    Raises:
        DamagedData: no index, or damaged.
    """
    try:
        unpacked = UnpackedArrays(data, scratch)
        arrays = unpacked.arrays
        head = json.loads(arrays["head"].tobytes())
        if head["version"] != VERSION:
            raise InputError(
                f"{where} is an index of another version of flambeau\n"
                "Pack the data again with this one, or remove the index: then the shards are read once"
            )
        return _Reading(arrays, head).shards(unpacked.forget)
    except InputError:
        raise
    except (
        *ZIP_ERRORS,
        OSError,
        LookupError,
        TypeError,
        AttributeError,
        MemoryError,
        OverflowError,
    ) as error:
        raise DamagedData(
            f"{where} is damaged, or no index of shards\n"
            "Upload it again, or remove it: then the shards are read once"
        ) from error


class _Reading:
    """Takes the parts of an index out of its arrays; ValueError if they do not fit."""

    def __init__(self, arrays: dict[str, NDArray[Any]], head: dict[str, Any]) -> None:
        self._arrays, self._head = arrays, head
        self._at: dict[str, int] = {}
        self._classes = [tuple(names) for names in head["classes"]]
        for names in self._classes:
            _require(all(isinstance(name, str) for name in names))
            _require(len({*names}) == len(names))
        for name, kind in _KINDS.items():
            _require(arrays[name].dtype == kind)
        _require(arrays["labels"].dtype in (np.int64, np.float32))
        # Of one storage, so that a `ConcatSource` of all parts copies none.
        self._labels = torch.from_numpy(arrays["labels"])

    def shards(self, forget: Callable[[], None]) -> list[ShardIndex]:
        """All shards; `forget` is called now and then, when what was checked may leave the memory."""
        found = []
        for number, facts in enumerate(self._head["shards"]):
            if number % _FORGET_AFTER == 0:
                forget()
            name = facts["name"]
            size = facts["size"]
            _require(isinstance(name, str) and Path(name).name == name and name not in ("", ".."))
            _require(type(size) is int and 0 < size < _MAX_BYTES)
            parts = tuple(self._part(one, size) for one in facts["parts"])
            _require(1 <= len(parts) <= 2)
            found.append(ShardIndex(name, size, parts))
        _require(bool(found))
        for name, array in self._arrays.items():
            _require(name == "head" or self._at.get(name, 0) == len(array))
        forget()
        return found

    def _take(self, name: str, count: Any) -> NDArray[Any]:
        _require(type(count) is int and count >= 0)
        start = self._at.get(name, 0)
        self._at[name] = start + count
        taken = self._arrays[name][start : start + count]
        _require(len(taken) == count)
        return taken

    def _part(self, facts: dict[str, Any], shard_size: int) -> ShardPart:
        count = facts["samples"]
        rows = None
        if "rows" in facts:
            rows = self._rows(facts["rows"], count, shard_size, 1 + ("masks" in facts))
        names = self._texts("names", facts["names"], count)
        images = self._places(facts, names, shard_size, is_packed=rows is not None)
        labels = self._labels[self._at.get("labels", 0) :][: len(self._take("labels", count))]
        classes = self._classes[facts["classes"]]
        task = facts["task"]
        separator = facts["separator"]
        _require(task in TASKS and (separator is None or isinstance(separator, str)))
        if task == "classification":
            _require(labels.dtype == torch.int64 and labels.dim() == 1)
            _require(bool(((labels >= 0) & (labels < len(classes))).all()))
        else:
            _require(labels.dtype == torch.float32 and labels.shape[1:] == (len(classes),))
        shapes = self._shapes(count, images.sizes) if facts["has_shapes"] else None
        columns = tuple(facts.get("columns", ()))
        _require(all(isinstance(name, str) for name in columns))
        groups = self._texts("texts", facts["groups"], count) if "groups" in facts else None
        parts = self._texts("texts", facts["parts"], count) if "parts" in facts else None
        _require(parts is None or {*parts} <= {*_PARTS})
        masks = None
        if "masks" in facts:
            masks = self._masks(facts["masks"], names, shard_size, is_packed=rows is not None)
        return ShardPart(
            task=task,
            separator=separator,
            classes=classes,
            fingerprint=_digest(facts["fingerprint"]),
            names=names,
            labels=labels,
            images=images,
            shapes=shapes,
            left_out={str(ending): int(number) for ending, number in facts["left_out"].items()},
            columns=columns,
            rows=rows,
            masks=masks,
            groups=groups,
            parts=parts,
        )

    def _places(
        self, facts: dict[str, Any], names: Texts, shard_size: int, *, is_packed: bool
    ) -> Places:
        count = len(names)
        offsets = self._take("offsets", count)
        sizes = self._take("sizes", count)
        _require(bool((offsets >= 0).all() and (sizes >= -1).all()))
        there = np.maximum(sizes, 0)  # bytes of each in the shard
        packed = None
        if facts.get("packed"):
            packed = self._take("packed", count)
            _require(bool((packed >= 0).all() and (packed <= shard_size).all()))
            most = np.where(packed > 0, MOST_DEFLATED * packed + SLACK, sizes)
            _require(bool((sizes <= most).all()))
            there = np.where(packed > 0, packed, there)
        if is_packed:
            # As a local file may unpack to; floating point, since integers could overflow.
            limit = max(SMALL, MOST_PACKED * shard_size)
            _require(float(np.maximum(sizes, 0).sum(dtype=np.float64)) <= limit)
        else:
            _require(bool((offsets <= shard_size - there).all()))
        inline = {
            int(at): self._take("inline", length).tobytes()
            for at, length in facts["inline"].items()
        }
        _require(all(0 <= at < count and sizes[at] == 0 for at in inline))
        tails = facts["tails"]
        if isinstance(tails, list):
            before, after = tails
            _require(isinstance(before, str) and isinstance(after, str))
            _require(len(before) + len(after) < _LONGEST_AROUND)
            texts = Texts(names.array, (before, after))
        else:
            texts = self._texts("tails", tails, count)
        return Places(texts, offsets, sizes, self._take("crcs", count), inline, packed)

    def _shapes(self, count: int, sizes: NDArray[np.int64]) -> NDArray[np.int32]:
        shapes = self._take("shapes", count)
        _require(shapes.shape == (count, 3) and bool(((shapes >= 0) & (shapes < _MAX_SIDE)).all()))
        area = shapes.astype(np.int64).prod(axis=1)
        _require(bool(((area == 0) | (area == sizes) | (sizes <= 0)).all()))
        return shapes

    def _rows(
        self, facts: dict[str, Any], count: int, shard_size: int, num_columns: int
    ) -> RowGroups:
        columns = tuple(facts["columns"])
        _require(len(columns) == num_columns and all(isinstance(one, str) for one in columns))
        lengths = self._take("rows", facts["groups"])
        _require(bool((lengths >= 0).all() and (lengths <= count).all()))
        _require(int(lengths.sum()) == count)
        start, size = facts["footer"]
        _require(type(start) is int and type(size) is int)
        _require(start > 0 and size > 0 and start + size == shard_size)
        crc = facts["crc"]
        _require(type(crc) is int and 0 <= crc < 1 << 32)
        return RowGroups(columns, lengths, start, size, crc)

    def _masks(
        self, facts: dict[str, Any], names: Texts, shard_size: int, *, is_packed: bool
    ) -> MaskPart:
        count = len(names)
        places = self._places(facts, names, shard_size, is_packed=is_packed)
        triples = self._take("counts", facts["counts"])
        _require(triples.shape[1:] == (3,))
        at, values, pixels = triples.T
        _require(bool((at < count).all() and (values < 256).all()))
        counts = np.zeros((count, 256), np.uint32)
        counts[at, values] = pixels
        problems = {int(number): text for number, text in facts["problems"].items()}
        _require(all(0 <= number < count for number in problems))
        _require(all(isinstance(text, str) for text in problems.values()))
        named = None
        if facts["named"] is not None:
            pairs, whose = facts["named"]
            _require(isinstance(whose, str) and Path(whose).name == whose)
            _require(all(type(k) is int and isinstance(name, str) for k, name in pairs))
            named = NamedValues(dict(pairs), whose)
        return MaskPart(places, _digest(facts["fingerprint"]), named, counts, problems)

    def _texts(self, name: str, size: Any, count: int) -> Texts:
        texts = Texts(self._take(name, size))
        _require(len(texts) == count and (not size or int(texts.array[-1]) == 0))
        return texts


def _digest(value: Any) -> str:
    _require(isinstance(value, str) and len(value) == 64)
    return str(value)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("the index contradicts itself")
