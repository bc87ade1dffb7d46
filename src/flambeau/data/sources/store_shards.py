"""Labelled images in a shard that lies in a store; see `open_store`, which finds and opens shards."""

import functools
import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.sample_blocks import block_lengths
from flambeau.data.sources.shard_index import ShardPart
from flambeau.data.sources.target_names import TaskName
from flambeau.data.stores.block_cache import BlockCache, CacheOptions
from flambeau.data.stores.fetch_ahead import FetchAhead
from flambeau.data.stores.store import StoreFault, changed, store
from flambeau.images.decode import Stored

_GAP = (
    1 << 16
)  # bytes between two images that are fetched along rather than skipped by a second request


class StoreShard:
    """The samples of a shard in a store: the same as those of the file on a local disk, to the fingerprint.

    Images are fetched in blocks of about 8 MiB, into a cache on the local disk; each is compared with its
    CRC-32 of the index, so an object that changes can never give other bytes.

    Args:
        index_of: what the index came from, for messages.

    Attributes:
        blocks: (B,) int64, samples per block, in order.
        image_sizes: see `image_sizes`.
    """

    def __init__(
        self, address: str, part: ShardPart, cache: CacheOptions, *, index_of: str | None = None
    ) -> None:
        self._address, self._part, self._cache, self._index_of = address, part, cache, index_of
        self.task: TaskName = part.task
        self.separator = part.separator
        self.classes = part.classes
        self.labels: Tensor = part.labels
        self.fingerprint = part.fingerprint
        self.left_out = (LeftOut(address, Counter(part.left_out)),)
        has_bad = bool(len(part) and part.sizes.min() < 0)
        sizes = np.maximum(part.sizes, 0) if has_bad else part.sizes
        self.image_sizes = (sizes,)
        self.blocks = block_lengths(sizes, np.array([len(part)]))
        self._ends = np.cumsum(self.blocks)
        self._keys: dict[int, str] = {}

    @property
    def names(self) -> Sequence[str]:
        return self._part.names

    def __len__(self) -> int:
        return len(self._part)

    def describe(self, index: int) -> str:
        return f"{self._address}{self._part.tails[index]}"

    def read(self, index: int) -> Stored:
        size = int(self._part.sizes[index])
        if size < 0:
            raise OSError(f"{self._address} holds no image here that can be read")
        data = self._part.inline.get(index)
        if data is None:
            data = self._bytes(index, size)
        shape = None if self._part.shapes is None else self._part.shapes[index]
        if shape is None or not shape.any():
            return data
        return np.frombuffer(data, np.uint8).reshape(shape)

    def fetch_ahead(self, indices: NDArray[Any]) -> bool:
        """Begin to fetch the blocks of these samples, in their order; False if enough are under way."""
        process = _process(self._cache)
        numbers = np.searchsorted(self._ends, indices, side="right")
        for block in dict.fromkeys(numbers.tolist()):
            key = self._key(block)
            if not process.cache.holds(key):
                process.ahead.submit(key, functools.partial(self._fetch_ahead, process, block, key))
        return not process.ahead.is_full

    def _fetch_ahead(self, process: "_Process", block: int, key: str) -> None:
        until = store().deadline()
        process.cache.ensure(key, lambda: self._fetched(block, until), until=until)

    def keep(self, content: Any) -> None:
        """Put the blocks of the whole shard, which is at hand, into the cache."""
        cache = cache_of(self._cache)
        for block in range(len(self.blocks)):
            cache.put(self._key(block), self._cut_out(block, content))

    def _bytes(self, index: int, size: int) -> bytes:
        block = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[block] - self.blocks[block])
        start = int(np.maximum(self._part.sizes[first:index], 0).sum())
        until = store().deadline()
        return _process(self._cache).cache.read(
            self._key(block), start, size, lambda: self._fetched(block, until), until=until
        )

    def _key(self, block: int) -> str:
        """What identifies the content of a block, wherever its shard lies."""
        key = self._keys.get(block)
        if key is None:
            stop = int(self._ends[block])
            samples = slice(stop - int(self.blocks[block]), stop)
            digest = hashlib.sha256(self.fingerprint.encode())
            digest.update(self._part.crcs[samples].tobytes())
            digest.update(self._part.sizes[samples].tobytes())
            key = self._keys[block] = digest.hexdigest()[:32]
        return key

    def _fetched(self, block: int, until: float) -> bytes:
        """The images of a block one behind the other, each as its CRC-32 says."""
        stop = int(self._ends[block])
        samples = range(stop - int(self.blocks[block]), stop)
        data = self._fetched_once(samples, until)
        if self._damaged(samples, data) is None:
            return data
        # Perhaps it was damaged on the way.
        data = self._fetched_once(samples, until)
        at = self._damaged(samples, data)
        if at is None:
            return data
        raise StoreFault(self._why_other(at))

    def _cut_out(self, block: int, content: Any) -> bytes:
        stop = int(self._ends[block])
        offsets, sizes = self._part.offsets, self._part.sizes
        samples = range(stop - int(self.blocks[block]), stop)
        present = (at for at in samples if sizes[at] > 0)
        return b"".join(content[int(offsets[at]) : int(offsets[at] + sizes[at])] for at in present)

    def _fetched_once(self, samples: range, until: float) -> bytes:
        sizes, offsets = self._part.sizes, self._part.offsets
        present = [at for at in samples if sizes[at] > 0]
        pieces: dict[int, memoryview] = {}
        for run in _runs(sorted(present, key=offsets.__getitem__), offsets, sizes):
            start = int(offsets[run[0]])
            end = max(int(offsets[at] + sizes[at]) for at in run)
            data = memoryview(store().read(self._address, start, end, until=until))
            for at in run:
                low = int(offsets[at]) - start
                pieces[at] = data[low : low + int(sizes[at])]
        return b"".join(pieces[at] for at in present)

    def _damaged(self, samples: range, data: bytes) -> int | None:
        """The first sample whose bytes are not those of the index; None if all are."""
        start = 0
        content = memoryview(data)
        for at in samples:
            size = int(self._part.sizes[at])
            if size <= 0:
                continue
            if zlib.crc32(content[start : start + size]) != int(self._part.crcs[at]):
                return at
            start += size
        return None

    def _why_other(self, index: int) -> str:
        if self._index_of is None:
            return changed(self._address)
        return (
            f"{self.describe(index)}: its bytes are not those that {self._index_of} says: the object was "
            "changed or damaged after it was packed\nUpload the shards and their index again, together"
        )


def _runs(
    samples: Sequence[int], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> list[list[int]]:
    """Samples in the order of their offsets, divided where the gap is too large for one request."""
    runs: list[list[int]] = []
    end = 0
    for at in samples:
        if not runs or int(offsets[at]) - end > _GAP:
            runs.append([])
        runs[-1].append(at)
        end = max(end, int(offsets[at] + sizes[at]))
    return runs


class _Process:
    """What the shards of one process share."""

    def __init__(self, options: CacheOptions) -> None:
        self.cache = BlockCache(options)
        self.ahead = FetchAhead()


_processes: dict[tuple[int, Path, int], _Process] = {}


def _process(options: CacheOptions) -> _Process:
    key = os.getpid(), options.path, options.size_bytes
    found = _processes.get(key)
    if found is None:
        for other in [other for other in _processes if other[0] != key[0]]:
            del _processes[other]  # of the process that this one was forked from
        found = _processes.setdefault(key, _Process(options))
    return found


def cache_of(options: CacheOptions) -> BlockCache:
    """The blocks of this process."""
    return _process(options).cache
