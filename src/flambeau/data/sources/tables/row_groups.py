"""The files in a row group of a Parquet file that is read in ranges of bytes.

Images lie in a column chunk of each row group, compressed as a whole, so that one of them cannot be fetched
alone: a row group is fetched and unpacked row by row.
"""

import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flambeau.optional_packages import extra

_ROWS = 16  # unpacked at once: memory for as many of the largest images
_PIECE = 16 << 20  # bytes of a request
_BUFFER = 1 << 20
_SMALL = 1 << 26  # bytes that any row group may unpack to
_MOST_PACKED = 2  # times the bytes of its images; the rest are lengths and headers of pages
_TAIL = 8  # at the end of a file: the length of its metadata, and PAR1


@dataclass(frozen=True)
class RowGroups:
    """The row groups of a Parquet file, and where its metadata lie.

    Attributes:
        columns: with a file of each row: its image, and its mask, if any.
        lengths: (G,) int64, rows of each row group.
        footer_start, footer_size, footer_crc: where the metadata at the end lie, and their CRC-32.
    """

    columns: tuple[str, ...]
    lengths: NDArray[np.int64]
    footer_start: int
    footer_size: int
    footer_crc: int


def packed_groups(path: Path, columns: tuple[str, ...]) -> RowGroups:
    """The row groups of a local file, which was read before."""
    parquet = extra("pyarrow.parquet", what=f"{path}")
    metadata = parquet.read_metadata(path)
    with path.open("rb") as file:
        size = file.seek(-_TAIL, io.SEEK_END) + _TAIL
        length = int.from_bytes(file.read(4), "little")
        start = file.seek(size - _TAIL - length)
        crc = zlib.crc32(file.read())
    return RowGroups(columns, group_lengths(metadata), start, size - start, crc)


def group_lengths(metadata: Any) -> NDArray[np.int64]:
    """(G,) rows of each row group, of pyarrow's metadata of a file."""
    groups = range(metadata.num_row_groups)
    return np.array([metadata.row_group(group).num_rows for group in groups], np.int64)


def unpacked_rows(
    rows: RowGroups,
    group: int,
    *,
    footer: bytes,
    num_bytes: int,
    read: Callable[[int, int], bytes],
) -> Iterator[tuple[bytes | None, ...]]:
    """The files in each row of a group; None where a row has none.

    `num_bytes` is that of all its files, by the index; `read` gives bytes start .. stop. ValueError, OSError:
    not the index's file, or damaged; or what `read` raises.
    """
    pa = extra("pyarrow", what="Parquet")
    parquet = extra("pyarrow.parquet", what="Parquet")
    file = _Ranges(footer, rows.footer_start, read)
    try:
        metadata = parquet.read_metadata(pa.BufferReader(footer))
        of_group = metadata.row_group(group)
        leaves = [of_group.column(at) for at in range(of_group.num_columns)]
        chunks = [leaf for leaf in leaves if leaf.path_in_schema in rows.columns]
        size = sum(chunk.total_uncompressed_size for chunk in chunks)
        if len(chunks) != len(rows.columns) or size > max(_SMALL, _MOST_PACKED * num_bytes):
            raise ValueError(f"row group {group} is another one than that of the index")
        file.chunks = [
            (_start(chunk), _start(chunk) + chunk.total_compressed_size) for chunk in chunks
        ]
        table = parquet.ParquetFile(file, metadata=metadata, pre_buffer=False, buffer_size=_BUFFER)
        names = list(rows.columns)
        for batch in table.iter_batches(
            _ROWS, row_groups=[group], columns=names, use_threads=False
        ):
            columns = [_column(pa, batch, name) for name in names]
            yield from zip(*(column.to_pylist() for column in columns), strict=True)
    except (pa.ArrowException, OverflowError, MemoryError) as error:
        _raise_first(file)
        raise ValueError(f"row group {group}: {error}") from error
    except OSError:
        _raise_first(file)
        raise


def _raise_first(file: "_Ranges") -> None:
    """The error of a request rather than what pyarrow makes of it."""
    if file.error is not None:
        raise file.error


def _start(chunk: Any) -> int:
    starts: list[int] = [chunk.data_page_offset]
    if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
        starts.append(chunk.dictionary_page_offset)
    return min(starts)


def _column(pa: Any, batch: Any, name: str) -> Any:
    """The bytes of a column; of a struct its part."""
    is_whole = name in batch.schema.names
    column = batch.column(name if is_whole else name.removesuffix(".bytes"))
    column.validate(full=True)
    if pa.types.is_struct(column.type):
        return dict(zip([part.name for part in column.type], column.flatten(), strict=True))[
            "bytes"
        ]
    return column


class _Ranges(io.RawIOBase):
    """A file whose end is at hand, and whose column chunks (start, end) are fetched in pieces."""

    def __init__(self, footer: bytes, start: int, read: Callable[[int, int], bytes]) -> None:
        self._footer, self._start, self._read = footer, start, read
        self._size = start + len(footer)
        self._at = 0
        self._pieces: dict[int, tuple[int, bytes]] = {}
        self.chunks: list[tuple[int, int]] = []
        self.error: BaseException | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size if size < 0 else min(self._at + size, self._size)
        if stop <= self._at:
            return b""
        try:
            data = self._between(self._at, stop)
        except BaseException as error:
            self.error = self.error or error
            raise
        self._at = stop
        return data

    def _between(self, start: int, stop: int) -> bytes:
        if start >= self._start:
            return self._footer[start - self._start : stop - self._start]
        at = next((at for at, (low, high) in enumerate(self.chunks) if low <= start < high), None)
        if at is None:
            # Metadata lie at the end, and nothing else is asked for.
            raise ValueError("a part of the file that is in no column of images")
        first, piece = self._pieces.get(at, (start, b""))
        if not first <= start <= stop <= first + len(piece):
            end = min(self.chunks[at][1], max(stop, start + _PIECE), self._start)
            first = start
            piece = self._read(start, max(end, stop))
            self._pieces[at] = first, piece
        return piece[start - first : stop - first]
