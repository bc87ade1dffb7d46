"""Labelled images in a Parquet file, read in any order from an Arrow copy.

A row group is unpacked as a whole: with 100 images of 100 KB in each, as Hugging Face writes them, one image
in random order costs 4 ms, plus 1.5 ms to decode it. The copy is made once, at 0.8 to 2.4 GB/s (400 MB,
pyarrow 26, one core), and equals the one that `datasets` makes, without its import of some seconds.
"""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flambeau.data.sources.data_names import data_home
from flambeau.data.sources.masks.masked_source import MaskedSource
from flambeau.data.sources.tables.arrow_file import ArrowSource, damaged_table
from flambeau.data.sources.tables.columns import Columns, choose_columns, other_columns
from flambeau.data.sources.tables.mask_columns import mask_columns, masked_table
from flambeau.data.sources.tables.row_groups import group_lengths
from flambeau.data.sources.tables.split_columns import SplitColumns, split_columns
from flambeau.data.sources.tables.target_cells import other_targets
from flambeau.data.sources.targets import FOUND, TargetChoice
from flambeau.errors import DamagedData, InputError, unreadable
from flambeau.optional_packages import extra
from flambeau.terminal import CountBar, say
from flambeau.unfinished_file import unfinished

ROWS = 16  # unpacked at once: memory for as many of the largest images
_BATCH_ROWS = 1000  # per batch of the copy; chosen, untested
_BATCH_BYTES = 1 << 25
SMALL = 1 << 26
"""Bytes that the images of any file may unpack to."""
MOST_PACKED = 32
"""Times its size that a file's images may unpack to."""
# Times the file's size that a row group may unpack to: the limit of deflate.
_GROUP_PACKED = 1032


def open_parquet(
    path: Path,
    *,
    labelled: bool = True,
    choice: TargetChoice = FOUND,
    copies: Path | None = None,
) -> ArrowSource | MaskedSource:
    """The images of a Parquet file.

    They are copied once into $FLAMBEAU_DATA or ~/.cache/flambeau/data, and again when the file has changed.
    With a folder `copies` the copy is made there, without a message, and no file beside the table is read.
    """
    try:
        status = path.stat()
        with path.open("rb"):
            pass  # Python's error is better than pyarrow's
    except OSError as error:
        raise unreadable(path, error) from error
    parquet = open_table(path)
    schema = parquet.schema_arrow
    masks = mask_columns(schema, path, choice) if labelled else None
    targets = None
    row_groups = group_lengths(parquet.metadata)
    split = SplitColumns()
    if labelled:
        split = split_columns(path, schema, all_rows(path, parquet), choice)
    if masks is not None:

        def opened(column: str) -> ArrowSource:
            columns = choose_columns(schema, path, labelled=False, image=column)
            copy = _copied(path, parquet, status, image=column, copies=copies)
            return ArrowSource(
                path,
                data=copy,
                unread=columns.unread,
                labelled=False,
                image=column,
                split=split,
                alone=copies is not None,
                row_groups=row_groups,
            )

        return masked_table(path, masks, choice, opened)
    if labelled:
        targets = other_targets(path, schema, all_rows(path, parquet), choice)
    columns = choose_columns(schema, path, labelled=labelled and targets is None)
    copy = _copied(path, parquet, status, copies=copies)
    return ArrowSource(
        path,
        data=copy,
        unread=columns.unread,
        labelled=labelled,
        targets=targets,
        split=split,
        alone=copies is not None,
        row_groups=row_groups,
    )


def _copied(
    path: Path,
    parquet: Any,
    status: os.stat_result,
    *,
    image: str | None = None,
    copies: Path | None = None,
) -> Path:
    """The Arrow copy of the images of a file, made if there is none."""
    folder = data_home() / "parquet" if copies is None else copies
    name = f"{path.stem}-{_hash(f'{path.absolute()} {image}' if image else str(path.absolute()))}"
    copy = folder / f"{name}-{_hash(f'1 {status.st_size} {status.st_mtime_ns}')}.arrow"
    if not copy.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{name}.lock"):
                if not copy.exists():
                    is_told = copies is None and os.environ.get("RANK", "0") == "0"
                    _copy(path, parquet, copy, image, is_told=is_told)
                    for old in folder.glob(f"{name}-*.arrow"):
                        if old != copy:
                            old.unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"{path} cannot be copied into {folder}: {(error.strerror or str(error)).lower()}\n"
                "Its images are read from there: make room, or name another folder as FLAMBEAU_DATA"
            ) from error
    return copy


def open_table(path: Path) -> Any:
    """A pyarrow.parquet.ParquetFile that unpacks little at once."""
    pa = extra("pyarrow", what=f"{path}")
    parquet = extra("pyarrow.parquet", what=f"{path}")
    try:
        table = parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        )
        table.schema_arrow  # noqa: B018 - it is made and checked at the first access
    except (pa.ArrowException, ValueError, OSError) as error:
        raise damaged_table(path, error) from error
    return table


def all_rows(path: Path, table: Any) -> Iterator[Any]:
    """The record batches of all row groups without the images."""
    names = other_columns(table.schema_arrow, path)
    for group in range(table.num_row_groups):
        yield from row_batches(path, table, group, names)


def row_batches(path: Path, table: Any, group: int, names: list[str]) -> Iterator[Any]:
    """The record batches of a row group, of ROWS rows."""
    pa = extra("pyarrow", what=f"{path}")
    try:
        # Damaged metadata of a single column would end the process (pyarrow 26, a C++ exception).
        size = table.metadata.row_group(group).total_byte_size
        if size > max(SMALL, _GROUP_PACKED * path.stat().st_size):
            raise ValueError(f"row group {group} claims to unpack to {size} bytes")
        yield from table.iter_batches(ROWS, row_groups=[group], columns=names, use_threads=False)
    except (pa.ArrowException, ValueError, OSError, OverflowError, MemoryError) as error:
        raise damaged_table(path, error) from error


def _copy(path: Path, table: Any, copy: Path, image: str | None, *, is_told: bool) -> None:
    """Write image and label columns as an Arrow stream, under a temporary name until it is complete."""
    pa = extra("pyarrow", what=f"{path}")
    try:
        columns = choose_columns(table.schema_arrow, path, labelled=image is None, image=image)
    except InputError:  # no labels: for images to predict on
        columns = choose_columns(table.schema_arrow, path, labelled=False)
    most = max(SMALL, MOST_PACKED * path.stat().st_size)
    if is_told:
        say(f"{path}: its images are copied once, into {copy}, to be read in any order")
    temporary = unfinished(copy)
    bar = CountBar(table.metadata.num_rows, unit="images", shown=is_told)
    try:
        with temporary.open("xb") as file, bar:
            batches = joined_batches(pa, _plain_batches(pa, path, table, columns, bar), _is_full)
            first = next(batches, None)
            if first is None:
                raise InputError(f"{path} holds no images")
            schema = first.schema.with_metadata(table.schema_arrow.metadata)
            with pa.ipc.new_stream(file, schema) as writer:
                while first is not None:
                    writer.write_batch(first)
                    if file.tell() > most:
                        raise DamagedData(
                            f"{path}: its images unpack to more than {MOST_PACKED} times its size\n"
                            "No file of images does: copy or make it again"
                        )
                    first = next(batches, None)
            file.flush()
            os.fsync(file.fileno())  # else a power cut could leave the name without its bytes
        temporary.replace(copy)
    finally:
        temporary.unlink(missing_ok=True)


def _plain_batches(
    pa: Any, path: Path, table: Any, columns: Columns, bar: CountBar
) -> Iterator[Any]:
    """The rows of all groups; dictionaries of labels, which differ between groups, are decoded."""
    for group in range(table.num_row_groups):
        for batch in row_batches(path, table, group, columns.names):
            bar.update(len(batch))
            arrays = [
                array.cast(array.type.value_type) if pa.types.is_dictionary(array.type) else array
                for array in (batch.column(name) for name in columns.names)
            ]
            yield pa.RecordBatch.from_arrays(arrays, columns.names)


def _is_full(batches: list[Any]) -> bool:
    is_long = sum(map(len, batches)) >= _BATCH_ROWS
    return is_long or sum(batch.nbytes for batch in batches) >= _BATCH_BYTES


def joined_batches(
    pa: Any, batches: Iterable[Any], is_full: Callable[[list[Any]], bool]
) -> Iterator[Any]:
    """Fewer and larger record batches: each costs time when a file is opened."""
    kept: list[Any] = []

    def joined() -> Any:
        return pa.Table.from_batches(kept).combine_chunks().to_batches()

    for batch in batches:
        kept.append(batch)
        if is_full(kept):
            yield from joined()
            kept.clear()
    if kept:
        yield from joined()


@contextlib.contextmanager
def _locked(lock: Path) -> Iterator[None]:
    """Let one process of a training copy while the others wait."""
    with lock.open("w") as file:
        with contextlib.suppress(
            ImportError
        ):  # Windows: each process makes a copy, the last one stays
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _hash(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:12]
