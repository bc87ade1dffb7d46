"""Arrays stored in blocks, and N5 data sets, which are such.

Source: N5's README, "File-system specification".

N5 is read here, without TensorStore: once used, that ends every process that is forked afterwards ("fork()
use detected"), and with it the worker processes of a DataLoader.
"""

import hashlib
import itertools
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flambeau.data.sources.arrays.array_roles import role_of
from flambeau.data.sources.arrays.n5_codecs import unpack, why_unreadable
from flambeau.data.sources.arrays.npy_pth import Array, MemoryRows, RefusedRows, Rows, damaged
from flambeau.errors import InputError

Place = tuple[int, ...]  # of a block in the grid of blocks

_N5_TYPES = (
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32", "float64",
)  # fmt: skip
_N5_MAX_BLOCK = 1 << 31  # bytes, by the specification
_SIZES = 4096  # sizes of block files that a fingerprint looks at: 20 ms


class BlockRows:
    """An array that lies in blocks.

    The blocks of the last rows read are kept: reading images in order unpacks each block once.
    In random order a block is unpacked for each image, so blocks of one image are the best.

    Args:
        shape: of the array, row-major.
        block: shape of a block; those at the far edges may be smaller, or stick out.
        dtype: of the items.
        fetch: gives the block at a place of the grid; None where it was never written, which means `fill`.
        fill: value of what was never written.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        block: tuple[int, ...],
        dtype: np.dtype[Any],
        fetch: Callable[[Place], Array | None],
        fill: Any = 0,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._block, self._fetch, self._fill = block, fetch, fill
        self._last: tuple[int, Array] | None = None

    def read(self, start: int, stop: int) -> Array:
        depth = self._block[0]
        bands = range(start // depth, -(-stop // depth))
        parts = []
        for number in bands:
            band, first = self._band(number), number * depth
            parts.append(band[max(0, start - first) : stop - first])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _band(self, number: int) -> Array:
        """All rows that are in blocks with this first coordinate."""
        last = self._last  # another thread may replace it
        if last is not None and last[0] == number:
            return last[1]
        rows = min(self._block[0], self.shape[0] - number * self._block[0])
        band = np.full((rows, *self.shape[1:]), self._fill, self.dtype)
        inner = list(zip(self.shape, self._block, strict=True))[1:]
        for rest in itertools.product(*(range(-(-side // step)) for side, step in inner)):
            block = self._fetch((number, *rest))
            if block is not None:
                starts = (0, *(at * step for at, (_, step) in zip(rest, inner, strict=True)))
                target = band[
                    tuple(slice(a, a + n) for a, n in zip(starts, block.shape, strict=True))
                ]
                target[...] = block[tuple(slice(n) for n in target.shape)]
        band.flags.writeable = False  # images are views of it
        self._last = number, band
        return band


def open_n5(folder: Path) -> dict[str, Rows]:
    """The data sets below a folder by name, and lists of text in attributes, such as class names.

    Axes are those of numpy as z5py and zarr write it: the last of `dimensions` is the first of the shape.
    Where a one-dimensional data set, as labels are, is as long as the first of `dimensions` and none is as
    long as the last, they are taken as they stand: so TensorStore writes an array of shape (N, H, W).

    Raises:
        InputError: damaged attributes, or an order of axes that cannot be told.
    """
    found: dict[str, Rows] = {}
    facts_of: dict[str, dict[str, Any]] = {}
    for path in _attribute_files(folder):
        name = path.parent.relative_to(folder).as_posix()
        facts = _read_attributes(path)
        if "dimensions" in facts:
            facts_of[name] = facts
        for key, value in facts.items():
            if role_of(key) is not None and _are_words(value):
                found[key if name == "." else f"{name}/{key}"] = MemoryRows(np.array(value))
    lengths = {
        facts["dimensions"][0] for facts in facts_of.values() if len(facts["dimensions"]) == 1
    }
    for name, facts in facts_of.items():
        first, last = facts["dimensions"][0], facts["dimensions"][-1]
        if len(facts["dimensions"]) > 1 and {first, last} <= lengths:
            raise InputError(
                f"{folder / name}: as many labels as the first and the last of dimensions "
                f"{facts['dimensions']}\nWhich of them counts the images cannot be told; write another format"
            )
        found[name] = _n5_rows(folder / name, facts, as_they_stand=first in lengths)
    return found


def n5_fingerprint(folder: Path, facts: str) -> str:
    """SHA-256, hexadecimal, of the attributes of a data set, its blocks' sizes, and what else is known of it.

    Of many blocks, which are files, some thousand evenly spaced ones are looked at.
    """
    path = folder / "attributes.json"
    attributes = _read_attributes(path)
    sides = zip(attributes["dimensions"], attributes["blockSize"], strict=True)
    grid = [-(-side // step) for side, step in sides]
    digest, count = hashlib.sha256(path.read_bytes()), math.prod(grid)
    for number in range(0, count, -(-count // _SIZES)):
        place = []
        rest = number
        for side in grid:
            rest, at = divmod(rest, side)
            place.append(str(at))
        try:
            size = folder.joinpath(*place).stat().st_size
        except FileNotFoundError:
            size = -1
        digest.update(f"{size} ".encode())
    digest.update(facts.encode())
    return digest.hexdigest()


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)


def _attribute_files(folder: Path) -> Iterator[Path]:
    """Not below a data set, where there may be one folder per block."""
    for where, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        if "attributes.json" in files:
            path = Path(where, "attributes.json")
            if "dimensions" in _read_attributes(path):
                folders.clear()
            yield path


def _read_attributes(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(facts, dict):
        raise damaged(path, f"a {type(facts).__name__} where an object is expected")
    if "dimensions" in facts:
        for key in ("dimensions", "blockSize"):
            sides = facts.get(key)
            if not (
                isinstance(sides, list) and sides and all(type(n) is int and n > 0 for n in sides)
            ):
                raise damaged(path, f"{key} is {sides!r:.60}, expected numbers above 0")
        if len(facts["dimensions"]) != len(facts["blockSize"]):
            raise damaged(path, "dimensions and blockSize are not of one length")
        if facts.get("dataType") not in _N5_TYPES:
            raise damaged(path, f"dataType is {facts.get('dataType')!r:.60}")
        if math.prod(facts["blockSize"]) * np.dtype(facts["dataType"]).itemsize > _N5_MAX_BLOCK:
            raise damaged(
                path, f"blocks of {facts['blockSize']} have more than {_N5_MAX_BLOCK} bytes"
            )
    return facts


def _n5_rows(folder: Path, facts: dict[str, Any], *, as_they_stand: bool) -> Rows:
    compression = facts.get("compression", facts.get("compressionType", "raw"))
    if isinstance(compression, dict):
        compression = compression.get("type")
    shape, block = (tuple(facts[key][::-1]) for key in ("dimensions", "blockSize"))
    dtype = np.dtype(facts["dataType"])
    reason = why_unreadable(str(compression))
    if reason is not None:
        return RefusedRows(shape, f"{folder} {reason}")
    fetch = partial(_n5_block, folder, dtype=dtype, block=block, compression=compression)
    if as_they_stand:
        return BlockRows(shape[::-1], block[::-1], dtype, lambda place: _transposed(fetch(place)))
    return BlockRows(shape, block, dtype, lambda place: fetch(place[::-1]))


def _transposed(block: Array | None) -> Array | None:
    return None if block is None else block.T


def _n5_block(
    folder: Path, place: Place, *, dtype: np.dtype[Any], block: tuple[int, ...], compression: str
) -> Array | None:
    """A block in row-major order; `place` counts the axes as N5 does, the fastest first."""
    path = folder.joinpath(*map(str, place))
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    at = 4 + 4 * len(place)
    if len(data) < at:
        raise OSError(f"{path} is cut short: {len(data)} bytes")
    mode, num_axes, *sides = struct.unpack_from(f">HH{len(place)}I", data)
    shape = tuple(sides[::-1])
    if mode > 1 or num_axes != len(place) or any(map(int.__gt__, shape, block)):
        raise OSError(f"{path} is damaged: mode {mode}, {num_axes} axes, block {sides}")
    size = math.prod(shape)
    if mode == 1:  # with the number of items, for blocks that hold another than their shape says
        items = int.from_bytes(data[at : at + 4], "big")
        if items != size:
            raise OSError(f"{path} has {items} items in a block of {size}")
        at += 4
    try:
        unpacked = unpack(data[at:], size * dtype.itemsize, compression)
    except OSError as error:
        raise OSError(f"{path}: {error}") from error
    return np.frombuffer(unpacked, dtype.newbyteorder(">")).reshape(shape)
