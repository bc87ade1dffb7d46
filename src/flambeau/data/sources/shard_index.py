"""All that is known of the samples of a shard without its content: an index, made once, kept as a file.

The sources of local files parse a shard; here is what they have found, with the place, the size and the
CRC-32 of each image, so that a source of the same samples can be made anywhere (see `store_shards`).

N: samples.
"""

import io
import json
import mmap
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.index_cache import joined, split_texts
from flambeau.data.sources.source import Source, left_out, pixel_kind
from flambeau.data.sources.target_names import TASKS, TaskName
from flambeau.data.sources.targets import separator_of, task_of
from flambeau.data.sources.unpacked_arrays import UnpackedArrays
from flambeau.errors import DamagedData, InputError

VERSION = 1
_FORGET_AFTER = 256  # shards that are checked
_NEAR = 1 << 22  # bytes behind an image in which the next one begins, nearly always
_MAX_SIDE = 1 << 20
_MAX_BYTES = 1 << 48


class Texts(Sequence[str]):
    """Texts out of one array, each followed by a zero."""

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self._data = data
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
        return iter(split_texts(self._data))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        ends = self._positions()
        at = range(len(ends))[index]
        start = int(ends[at - 1]) + 1 if at else 0
        return self._data[start : int(ends[at])].tobytes().decode(errors="surrogateescape")

    @property
    def array(self) -> NDArray[np.uint8]:
        return self._data


@dataclass(frozen=True)
class ShardPart:
    """The samples of a shard to train on, or those to validate on; nearly always there is one part.

    Attributes:
        fingerprint: of the source of the local file.
        tails: what stands behind the name of the file in messages about a sample.
        labels: (N,) int64 or (N, K) float32.
        offsets, sizes: (N,) int64; of images that cannot be read the size is -1.
        crcs: (N,) uint32.
        shapes: (N, 3) int32, zeros for files of images; None if all are such.
        inline: the images that are no run of bytes of the file, by number.
        left_out: how many files beside the images are not read, by their ending.
    """

    task: TaskName
    separator: str | None
    classes: tuple[str, ...]
    fingerprint: str
    names: Texts
    tails: Texts
    labels: Tensor
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    shapes: NDArray[np.int32] | None
    inline: dict[int, bytes]
    left_out: dict[str, int]

    def __len__(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class ShardIndex:
    """One shard: its name, its size in bytes, and its parts."""

    name: str
    size: int
    parts: tuple[ShardPart, ...]


def index_shard(path: Path, opened: tuple[Source, Source | None], *, where: str) -> ShardIndex:
    """The index of a local file, as its sources were opened.

    Args:
        where: the name of the shard in messages.

    Raises:
        InputError: it has masks or other pixels than those of 8 bits.
    """
    parts = tuple(_part(path, source, where) for source in opened if source is not None)
    return ShardIndex(path.name, path.stat().st_size, parts)


def _part(path: Path, source: Source, where: str) -> ShardPart:
    if task_of(source) == "segmentation" or pixel_kind(source) != "uint8":
        raise InputError(
            f"{where} has masks or pixels of more than 8 bits, which are not read from a store yet\n"
            "Copy the shards to a disk, and name those"
        )
    start = str(path.absolute())
    spans = _spans(path, source)
    shapes = np.array([shape for _, _, _, shape, _ in spans], np.int32).reshape(-1, 3)
    return ShardPart(
        task=task_of(source),
        separator=separator_of(source),
        classes=tuple(source.classes),
        fingerprint=source.fingerprint,
        names=Texts(joined(source.names)),
        tails=Texts(joined(source.describe(at).removeprefix(start) for at in range(len(source)))),
        labels=source.labels,
        offsets=np.array([span[0] for span in spans], np.int64),
        sizes=np.array([span[1] for span in spans], np.int64),
        crcs=np.array([span[2] for span in spans], np.uint32),
        shapes=shapes if shapes.any() else None,
        inline={at: span[4] for at, span in enumerate(spans) if span[4] is not None},
        left_out=dict(sum((one.counts for one in left_out(source)), Counter[str]())),
    )


_Span = tuple[int, int, int, tuple[int, ...], bytes | None]


def _spans(path: Path, source: Source) -> list[_Span]:
    """Offset, size, CRC-32, shape and, where they are no run of bytes of the file, the bytes of each image.

    Whoever reads the format has the bytes of an image, and any place with the same bytes is as good as its
    own: so nothing needs to know here how a format is laid out.
    """
    spans: list[_Span] = []
    at = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for index in range(len(source)):
            try:
                stored = source.read(index)
            except OSError:  # a bad image, which is named when it is read
                spans.append((0, -1, 0, (0, 0, 0), None))
                continue
            shape: tuple[int, ...] = (0, 0, 0)
            if isinstance(stored, np.ndarray):
                shape = stored.shape
            data = stored if isinstance(stored, bytes) else np.ascontiguousarray(stored).tobytes()
            found = content.find(data, at, at + len(data) + _NEAR)
            found = content.find(data) if found < 0 else found
            if found < 0:
                spans.append((0, 0, zlib.crc32(data), shape, data))
                continue
            at = found + len(data)
            spans.append((found, len(data), zlib.crc32(data), shape, None))
    return spans


def write_index(shards: Sequence[ShardIndex]) -> bytes:
    """The content of a file: a .npz without objects."""
    classes: dict[tuple[str, ...], int] = {}
    facts = []
    for shard in shards:
        parts = []
        for part in shard.parts:
            number = classes.setdefault(part.classes, len(classes))
            parts.append(
                {
                    "samples": len(part),
                    "task": part.task,
                    "separator": part.separator,
                    "classes": number,
                    "fingerprint": part.fingerprint,
                    "names": len(part.names.array),
                    "tails": len(part.tails.array),
                    "inline": {str(at): len(data) for at, data in part.inline.items()},
                    "left_out": part.left_out,
                    "has_shapes": part.shapes is not None,
                }
            )
        facts.append({"name": shard.name, "size": shard.size, "parts": parts})
    head = {"version": VERSION, "classes": [list(names) for names in classes], "shards": facts}
    parts_of_all = [part for shard in shards for part in shard.parts]
    inline = b"".join(data for part in parts_of_all for data in part.inline.values())
    file = io.BytesIO()
    np.savez_compressed(
        file,
        head=np.frombuffer(json.dumps(head).encode(), np.uint8),
        names=_joined([part.names.array for part in parts_of_all], np.uint8),
        tails=_joined([part.tails.array for part in parts_of_all], np.uint8),
        labels=_joined([part.labels.numpy() for part in parts_of_all], None),
        offsets=_joined([part.offsets for part in parts_of_all], np.int64),
        sizes=_joined([part.sizes for part in parts_of_all], np.int64),
        crcs=_joined([part.crcs for part in parts_of_all], np.uint32),
        shapes=_joined([part.shapes for part in parts_of_all if part.shapes is not None], np.int32),
        inline=np.frombuffer(inline, np.uint8),
    )
    return file.getvalue()


def _joined(arrays: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, kind)


def read_index(data: bytes, where: str, *, scratch: Path | None = None) -> list[ShardIndex]:
    """The inverse of `write_index`; nothing is believed before it is checked.

    Args:
        scratch: a folder of the disk, where what is large is kept in a file without a name.

    Raises:
        DamagedData: it is no such file, or damaged.
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
        ValueError,
        KeyError,
        TypeError,
        OSError,
        EOFError,
        IndexError,
        AttributeError,
    ) as error:
        raise _damaged(where) from error
    except (zipfile.BadZipFile, zlib.error, MemoryError, RecursionError, OverflowError) as error:
        raise _damaged(where) from error


def _damaged(where: str) -> DamagedData:
    return DamagedData(
        f"{where} is damaged, or no index of shards\n"
        "Upload it again, or remove it: then the shards are read once"
    )


class _Reading:
    """Takes the parts of an index out of its arrays; ValueError if they do not fit."""

    def __init__(self, arrays: dict[str, NDArray[Any]], head: dict[str, Any]) -> None:
        self._arrays, self._head = arrays, head
        self._at: dict[str, int] = {}
        self._classes = [tuple(names) for names in head["classes"]]
        for names in self._classes:
            _require(all(isinstance(name, str) for name in names))
            _require(len({*names}) == len(names))
        kinds = {
            "names": np.uint8,
            "tails": np.uint8,
            "offsets": np.int64,
            "sizes": np.int64,
            "crcs": np.uint32,
            "shapes": np.int32,
            "inline": np.uint8,
        }
        for name, kind in kinds.items():
            _require(arrays[name].dtype == kind)
        _require(arrays["labels"].dtype in (np.int64, np.float32))

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
        offsets = self._take("offsets", count)
        sizes = self._take("sizes", count)
        _require(bool((offsets >= 0).all() and (sizes >= -1).all() and (sizes <= shard_size).all()))
        _require(bool((offsets <= shard_size - np.maximum(sizes, 0)).all()))
        names = self._texts("names", facts, count)
        tails = self._texts("tails", facts, count)
        labels = torch.from_numpy(self._take("labels", count))
        classes = self._classes[facts["classes"]]
        task = facts["task"]
        separator = facts["separator"]
        _require(task in TASKS and (separator is None or isinstance(separator, str)))
        if task == "classification":
            _require(labels.dtype == torch.int64 and labels.dim() == 1)
            _require(bool(((labels >= 0) & (labels < len(classes))).all()))
        else:
            _require(labels.dtype == torch.float32 and labels.shape[1:] == (len(classes),))
        shapes = self._take("shapes", count) if facts["has_shapes"] else None
        if shapes is not None:
            _require(
                shapes.shape == (count, 3) and bool(((shapes >= 0) & (shapes < _MAX_SIDE)).all())
            )
            area = shapes.astype(np.int64).prod(axis=1)
            _require(bool(((area == 0) | (area == sizes) | (sizes <= 0)).all()))
        inline = {
            int(at): self._take("inline", length).tobytes()
            for at, length in facts["inline"].items()
        }
        _require(all(0 <= at < count and sizes[at] == 0 for at in inline))
        fingerprint = facts["fingerprint"]
        _require(isinstance(fingerprint, str) and len(fingerprint) == 64)
        left = {str(ending): int(number) for ending, number in facts["left_out"].items()}
        crcs = self._take("crcs", count)
        return ShardPart(
            task,
            separator,
            classes,
            fingerprint,
            names,
            tails,
            labels,
            offsets,
            sizes,
            crcs,
            shapes,
            inline,
            left,
        )

    def _texts(self, name: str, facts: dict[str, Any], count: int) -> Texts:
        texts = Texts(self._take(name, facts[name]))
        _require(len(texts) == count and (not facts[name] or int(texts.array[-1]) == 0))
        return texts


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("the index contradicts itself")
