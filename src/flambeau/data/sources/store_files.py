"""Files of samples in an object of a store, fetched in blocks, into a cache on the local disk.

N: samples, F: files of each: its image, and its mask if it has one.
"""

import contextlib
import contextvars
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from isal import isal_zlib
from numpy.typing import NDArray

from flambeau.data.sources.sample_blocks import block_lengths
from flambeau.data.sources.shard_index import Places
from flambeau.data.sources.tables.row_groups import RowGroups, unpacked_rows
from flambeau.data.sources.zip_members import inflated
from flambeau.data.stores.block_cache import BlockCache, CacheOptions
from flambeau.data.stores.fetch_ahead import FetchAhead
from flambeau.data.stores.store import StoreFault, changed, store

_GAP = 1 << 16  # bytes between two images that are fetched along, rather than by a second request


_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)


@contextlib.contextmanager
def read_alone() -> Iterator[None]:
    """Within it files of shards are fetched without the rest of their blocks, where possible.

    For some images out of all blocks.
    """
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


class StoreFiles:
    """The files of the samples of a shard.

    Each is compared with its CRC-32 in the index, so a changed object never gives other bytes. A block holds
    the files of neighbouring samples, about 8 MiB; in a Parquet file it is a part of a row group, all of
    whose blocks are kept when one is fetched.

    Args:
        places: F of them.
        identity: of the content, wherever the object lies.
        index_of: what the index came from, for messages.
    """

    def __init__(
        self,
        address: str,
        places: Sequence[Places],
        cache: CacheOptions,
        *,
        identity: str,
        rows: RowGroups | None = None,
        index_of: str | None = None,
    ) -> None:
        self._address, self._places, self._cache = address, places, cache
        self._identity, self._rows, self._index_of = identity, rows, index_of
        self._keys: dict[int, str] = {}
        self._offsets = _side_by_side([one.offsets for one in places])
        self._crcs = _side_by_side([one.crcs for one in places])
        self._stored_sizes = _side_by_side([one.sizes for one in places])
        self._packed = None
        if any(one.packed is not None for one in places):
            none = np.zeros(len(self._crcs), np.int64)
            self._packed = _side_by_side([none if p.packed is None else p.packed for p in places])
        self._sizes = self._stored_sizes
        if len(self._sizes) and self._sizes.min() < 0:
            self._sizes = np.maximum(self._sizes, 0)
        lengths = np.array([len(self._sizes)]) if rows is None else rows.lengths
        self._group_ends = np.cumsum(lengths)

    @functools.cached_property
    def blocks(self) -> NDArray[np.int64]:
        """(B,) samples per block, in order."""
        lengths = np.diff(self._group_ends, prepend=0)
        # With masks, within the blocks of the images alone, from which the order of an epoch is made.
        is_alone = len(self._places) == 1
        within = lengths if is_alone else block_lengths(self._sizes[:, 0], lengths)
        return block_lengths(self._sizes.sum(1), within)

    @functools.cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.blocks)

    def describe(self, index: int, column: int) -> str:
        return f"{self._address}{self._places[column].tails[index]}"

    def read(self, index: int, column: int = 0) -> bytes:
        """A file; OSError if it was unreadable when the shard was indexed."""
        size = int(self._stored_sizes[index, column])
        if size < 0:
            raise OSError(f"{self._address} holds no image here that can be read")
        inline = self._places[column].inline.get(index)
        if inline is not None:
            return inline
        block = self._block_of(index)
        if _alone.get() and not cache_of(self._cache).holds(self._key(block)):
            data = self._fetched_alone(index, column)
            if data is not None:
                return data
        first = self._samples(block).start
        start = int(self._sizes[first:index].sum() + self._sizes[index, :column].sum())
        until = store().deadline()
        return _process(self._cache).cache.read(
            self._key(block), start, size, lambda: self._fetched(block, until), until=until
        )

    def _fetched_alone(self, index: int, column: int) -> bytes | None:
        """A file without the rest of its block; None if that cannot be, or other bytes arrive."""
        if self._rows is not None:
            return None
        file = index, column
        start = int(self._offsets[file])
        data = store().read(self._address, start, self._end(file), until=store().deadline())
        if self._packed is not None and self._packed[file]:
            data = inflated(memoryview(data), int(self._sizes[file]))
        return data if isal_zlib.crc32(data) == int(self._crcs[file]) else None

    def fetch_ahead(self, indices: NDArray[Any]) -> bool:
        """Begin to fetch these samples' blocks, in order; False if enough are under way."""
        process = _process(self._cache)
        numbers = np.searchsorted(self._ends, indices, side="right")
        for block in dict.fromkeys(numbers.tolist()):
            key = self._key(block)
            if not process.cache.holds(key):
                # One call for all blocks of a row group, which come together.
                name = key if self._rows is None else self._group_key(self._group_of(block))
                process.ahead.submit(
                    name, functools.partial(self._fetch_ahead, process, block, key)
                )
        return not process.ahead.is_full

    def _fetch_ahead(self, process: "_Process", block: int, key: str) -> None:
        until = store().deadline()
        process.cache.ensure(key, lambda: self._fetched(block, until), until=until)

    def keep(self, content: Callable[[int, int], bytes]) -> None:
        """Put all blocks into the cache; `content`: a file's bytes by sample and column."""
        cache = cache_of(self._cache)
        for block in range(len(self.blocks)):
            files = itertools.product(self._samples(block), range(len(self._places)))
            present = (content(*file) for file in files if self._sizes[file] > 0)
            cache.put(self._key(block), b"".join(present))

    def contents(self) -> Iterator[tuple[bytes | None, ...]]:
        """Each sample's files from the store; None for one that is not as indexed."""
        if self._rows is None:
            for block in range(len(self.blocks)):
                data = self._fetched_once(block, store().deadline())
                if next(self._others(block, data), None) is not None:  # perhaps on the way
                    data = self._fetched_once(block, store().deadline())
                yield from self._divided(block, data)
            return
        for group, length in enumerate(np.diff(self._group_ends, prepend=0).tolist()):
            count = 0
            for is_last in (False, True):
                try:
                    for sample in itertools.islice(self._of_rows(group, is_last), count, None):
                        yield sample
                        count += 1
                    break
                except _OtherBytes:
                    pass
            yield from itertools.repeat((None,) * len(self._places), length - count)

    def _of_rows(self, group: int, is_last: bool) -> Iterator[tuple[bytes | None, ...]]:
        """As `contents`, of a row group; _OtherBytes for other bytes, unless this is the last try."""
        for block, data in self._blocks_of(group, store().deadline()):
            other = next(self._others(block, data), None)
            if other is not None and not is_last:
                raise _OtherBytes(other)
            yield from self._divided(block, data)

    def _divided(self, block: int, data: bytes) -> Iterator[tuple[bytes | None, ...]]:
        others = {*self._others(block, data)}
        start = 0
        for index in self._samples(block):
            found: list[bytes | None] = []
            for column, places in enumerate(self._places):
                size = int(self._sizes[index, column])
                is_there = self._stored_sizes[index, column] >= 0 and (index, column) not in others
                content = places.inline.get(index, data[start : start + size])
                found.append(content if is_there else None)
                start += size
            yield tuple(found)

    # ------------------------------------------------------------ blocks

    def _block_of(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))

    def _samples(self, block: int) -> range:
        stop = int(self._ends[block])
        return range(stop - int(self.blocks[block]), stop)

    def _slice(self, block: int) -> slice:
        samples = self._samples(block)
        return slice(samples.start, samples.stop)

    def _key(self, block: int) -> str:
        """What identifies the content of a block, wherever its shard lies."""
        key = self._keys.get(block)
        if key is None:
            chosen = self._slice(block)
            digest = hashlib.sha256(self._identity.encode())
            digest.update(self._crcs[chosen].tobytes())
            digest.update(self._stored_sizes[chosen].tobytes())
            key = self._keys[block] = digest.hexdigest()[:32]
        return key

    def _fetched(self, block: int, until: float) -> bytes:
        """The files of a block one behind the other, each as its CRC-32 says."""
        if self._rows is not None:
            return self._of_group(block, until)
        data = self._fetched_once(block, until)
        if next(self._others(block, data), None) is None:
            return data
        # Perhaps it was damaged on the way.
        data = self._fetched_once(block, until)
        other = next(self._others(block, data), None)
        if other is None:
            return data
        raise StoreFault(self._why_other(*other))

    def _fetched_once(self, block: int, until: float) -> bytes:
        files = itertools.product(self._samples(block), range(len(self._places)))
        present = [file for file in files if self._sizes[file] > 0]
        pieces: dict[tuple[int, int], memoryview] = {}
        for run in self._runs(present):
            start = int(self._offsets[run[0]])
            end = max(self._end(file) for file in run)
            data = memoryview(store().read(self._address, start, end, until=until))
            for file in run:
                pieces[file] = data[int(self._offsets[file]) - start : self._end(file) - start]
                if self._packed is not None and self._packed[file]:
                    pieces[file] = memoryview(inflated(pieces[file], int(self._sizes[file])))
        return b"".join(pieces[file] for file in present)

    def _runs(self, files: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Files in the order of their offsets, divided where the gap is too large for one request."""
        runs: list[list[tuple[int, int]]] = []
        end = 0
        for file in sorted(files, key=self._offsets.__getitem__):
            if not runs or int(self._offsets[file]) - end > _GAP:
                runs.append([])
            runs[-1].append(file)
            end = max(end, self._end(file))
        return runs

    def _end(self, file: tuple[int, int]) -> int:
        """Where the bytes of a file end in the object."""
        packed = 0 if self._packed is None else int(self._packed[file])
        return int(self._offsets[file]) + (packed or int(self._sizes[file]))

    def _others(self, block: int, data: bytes) -> Iterator[tuple[int, int]]:
        """Sample and column of the files whose bytes are not those of the index."""
        start = 0
        content = memoryview(data)
        for file in itertools.product(self._samples(block), range(len(self._places))):
            size = int(self._sizes[file])
            if size and isal_zlib.crc32(content[start : start + size]) != int(self._crcs[file]):
                yield file
            start += size

    def _why_other(self, index: int, column: int) -> str:
        if self._index_of is None:
            return changed(self._address)
        return (
            f"{self.describe(index, column)}: its bytes are not those that {self._index_of} says: the object "
            "was changed or damaged after it was packed\nUpload the shards and their index again, together"
        )

    # ------------------------------------------------------------ row groups

    def _group_of(self, block: int) -> int:
        return int(np.searchsorted(self._group_ends, self._samples(block).start, side="right"))

    def _group_key(self, group: int) -> str:
        return hashlib.sha256(f"{self._identity} row group {group}".encode()).hexdigest()[:32]

    def _of_group(self, block: int, until: float) -> bytes:
        """A block of a row group, all of whose blocks are kept."""
        group = self._group_of(block)
        cache = cache_of(self._cache)
        with cache.alone(self._group_key(group), until, kind="group"):
            known = cache.known(self._key(block), 0, int(self._sizes[self._slice(block)].sum()))
            if known is not None:
                return known
            try:
                return self._kept_group(group, block, until)
            except _OtherBytes:  # perhaps it was damaged on the way
                pass
            try:
                return self._kept_group(group, block, until)
            except _OtherBytes as error:
                raise StoreFault(self._why_other(*error.file)) from error

    def _kept_group(self, group: int, wanted: int, until: float) -> bytes:
        """Keep the blocks of a row group, and return one of them."""
        cache = cache_of(self._cache)
        found = b""
        for block, data in self._blocks_of(group, until):
            other = next(self._others(block, data), None)
            if other is not None:
                raise _OtherBytes(other)
            if block == wanted:
                found = data
            else:
                cache.put(self._key(block), data)
        return found

    def _blocks_of(self, group: int, until: float) -> Iterator[tuple[int, bytes]]:
        """Number and content of each block of a row group."""
        stop = int(self._group_ends[group])
        first = stop - int(np.diff(self._group_ends, prepend=0)[group])
        files = self._files_of(group, first, stop, until)
        for block in range(
            self._block_of(first), self._block_of(stop - 1) + 1 if stop > first else 0
        ):
            taken = itertools.islice(files, len(self._samples(block)) * len(self._places))
            yield block, b"".join(taken)

    def _files_of(self, group: int, first: int, stop: int, until: float) -> Iterator[bytes]:
        """The files of a row group; _OtherBytes if it is another one than that of the index."""
        assert self._rows is not None
        rows = unpacked_rows(
            self._rows,
            group,
            footer=self._footer(until),
            num_bytes=int(self._sizes[first:stop].sum()),
            read=lambda start, end: store().read(self._address, start, end, until=until),
        )
        index = first
        try:
            for row in rows:
                for column, data in enumerate(row):
                    if len(data or b"") != int(self._sizes[index, column]):
                        raise _OtherBytes((index, column))
                    yield data or b""
                index += 1
        except StoreFault:
            raise
        except (ValueError, OSError, IndexError) as error:
            raise _OtherBytes((min(index, stop - 1), 0)) from error
        if index != stop:
            raise _OtherBytes((min(index, stop - 1), 0))

    def _footer(self, until: float) -> bytes:
        """The metadata at the end of the object, kept like a block."""
        assert self._rows is not None
        rows = self._rows
        facts = f"{self._identity} footer {rows.footer_crc}"
        key = hashlib.sha256(facts.encode()).hexdigest()[:32]

        def fetch() -> bytes:
            stop = rows.footer_start + rows.footer_size
            for _ in range(2):  # perhaps it is damaged on the way
                data = store().read(self._address, rows.footer_start, stop, until=until)
                if isal_zlib.crc32(data) == rows.footer_crc:
                    return data
            raise _OtherBytes((0, 0))

        return cache_of(self._cache).read(key, 0, rows.footer_size, fetch, until=until)


def _side_by_side(columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """(N, F); a view of a column that is alone, since those of millions of samples lie on the disk."""
    return columns[0][:, None] if len(columns) == 1 else np.stack(columns, axis=1)


class _OtherBytes(Exception):
    """What arrives is not what the index says, first of all this file: its sample and column."""

    def __init__(self, file: tuple[int, int]) -> None:
        super().__init__(file)
        self.file = file


class _Process:
    def __init__(self, options: CacheOptions) -> None:
        self.cache = BlockCache(options)
        self.ahead = FetchAhead()


_processes: dict[tuple[int, Path, int], _Process] = {}


def _process(options: CacheOptions) -> _Process:
    key = os.getpid(), options.path, options.size_bytes
    found = _processes.get(key)
    if found is None:
        for other in list(_processes):
            if other[0] != key[0]:  # of the process that this one was forked from
                _processes.pop(other, None)  # another thread may be here, too
        found = _processes.setdefault(key, _Process(options))
    return found


def cache_of(options: CacheOptions) -> BlockCache:
    return _process(options).cache
