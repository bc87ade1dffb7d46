"""Parquet and Arrow files of images: writing, and reading row by row past damage.

The columns and the features in the schema's metadata are those that Hugging Face datasets 5.2
writes for Image and ClassLabel, so that `datasets.load_dataset` and the Hub's viewer show images and names.
"""

import contextlib
import itertools
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flambeau.data.pack.salvage_records import ScannedRecord
from flambeau.data.sources.packed_targets import TargetHead, as_metadata, of_metadata
from flambeau.data.sources.tables.arrow_file import (
    arrow_batches,
    batch_of,
    damaged_table,
    no_label,
    read_path,
)
from flambeau.data.sources.tables.columns import Columns, choose_columns
from flambeau.data.sources.tables.mask_columns import mask_columns
from flambeau.data.sources.tables.parquet_file import (
    all_rows,
    joined_batches,
    open_table,
    row_batches,
)
from flambeau.data.sources.tables.target_cells import (
    PACKED_COLUMN,
    TableTargets,
    other_targets,
    packed_vector,
)
from flambeau.data.sources.targets import FOUND
from flambeau.errors import DamagedData, InputError
from flambeau.images.stand_ins import why_unreadable
from flambeau.optional_packages import extra

# Statistics of images would store small ones again, as minimum and maximum of a page.
_PARQUET: dict[str, Any] = {
    "use_dictionary": False,
    "write_statistics": ["label"],
    "write_page_checksum": True,
    "write_page_index": True,
}
_GROUP_ROWS = 100  # as Hugging Face does for images
_GROUP_BYTES = 1 << 25


def _label_column(pa: Any, head: TargetHead) -> tuple[str, Any, dict[str, Any]]:
    """Name, type and feature of the column of labels."""
    if head.task == "segmentation":
        return "mask", _file_type(pa), {"_type": "Image"}
    classes = {"names": list(head.names), "_type": "ClassLabel"}
    if not head.has_vectors:
        return "label", pa.int64(), classes
    if head.separator is not None:
        return PACKED_COLUMN, pa.list_(pa.int64()), {"feature": classes, "_type": "List"}
    value = {"dtype": "float32", "_type": "Value"}
    return PACKED_COLUMN, pa.list_(pa.float32()), {"feature": value, "_type": "List"}


def _file_type(pa: Any) -> Any:
    return pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def _cell(label: int | float | Tensor | bytes, head: TargetHead) -> Any:
    """A label as `packed_vector` reads it; null for an unknown value."""
    if isinstance(label, bytes):
        return {"bytes": label, "path": None}
    if not isinstance(label, Tensor):
        return label
    if head.separator is not None:
        return label.nonzero()[:, 0].tolist()
    return [None if math.isnan(value) else value for value in label.tolist()]


@contextlib.contextmanager
def open_table_writer(
    kind: str, path: Path, head: TargetHead
) -> Iterator[Callable[[bytes, str, int | float | Tensor | bytes], None]]:
    """A function that adds image, name and label or mask to a new table, whole at the end."""
    pa = extra("pyarrow", what=f"writing {kind}")
    image = _file_type(pa)
    column, column_type, feature = _label_column(pa, head)
    features = {"image": {"_type": "Image"}, column: feature}
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    metadata |= as_metadata(head) if head.has_vectors else {}
    schema = pa.schema([("image", image), (column, column_type)], metadata=metadata)
    rows: list[dict[str, Any]] = []
    with _sink(kind, path, schema) as write_batch:

        def flush() -> None:
            if rows:
                write_batch(pa.RecordBatch.from_pylist(rows, schema))
                rows.clear()

        def write(data: bytes, name: str, label: int | float | Tensor | bytes) -> None:
            text = name.encode(errors="surrogateescape").decode(errors="replace")
            rows.append({"image": {"bytes": data, "path": text}, column: _cell(label, head)})
            if _is_full([len(row["image"]["bytes"]) for row in rows]):
                flush()

        yield write
        flush()


def save_rows(records: Iterable[ScannedRecord], kind: str, target: Path) -> None:
    """Write rows of `walk_table` into a new table, with all their columns."""
    pa = extra("pyarrow", what=f"writing {kind}")
    rows = (record.content for record in records)
    first = next(rows, None)
    if first is None:
        return
    with _sink(kind, target, first.schema) as write:
        for batch in joined_batches(
            pa, itertools.chain([first], rows), lambda kept: _is_full([row.nbytes for row in kept])
        ):
            write(batch)


def walk_table(path: Path, kind: str) -> Iterator[ScannedRecord]:
    """The rows of a table; after damage a Parquet file continues at the next row group."""
    return _walk_parquet(path) if kind == "parquet" else _walk_arrow(path)


def _walk_parquet(path: Path) -> Iterator[ScannedRecord]:
    pa = extra("pyarrow", what=f"{path}")
    table = open_table(path)
    columns = _columns(table.schema_arrow, path, lambda: all_rows(path, table))
    row = 0
    for group in range(table.num_row_groups):
        end = row + table.metadata.row_group(group).num_rows
        try:
            for batch in row_batches(path, table, group, table.schema_arrow.names):
                yield from _rows(pa, path, row, batch, columns)
                row += len(batch)
        except (DamagedData, pa.ArrowException) as error:
            reason = str(error).splitlines()[0].rpartition("damaged or cut short: ")[2]
            yield ScannedRecord(
                f"rows {row} to {end - 1}, in row group {group}", None, damage=reason
            )
        row = end


def _walk_arrow(path: Path) -> Iterator[ScannedRecord]:
    pa = extra("pyarrow", what=f"{path}")
    row = 0
    with pa.memory_map(str(path)) as mapped:
        try:
            buffer = mapped.read_buffer()
            schema, batches = arrow_batches(pa, path, buffer)
            columns = _columns(schema, path, lambda: arrow_batches(pa, path, buffer)[1])
            for batch in batches:
                batch.validate(full=True)
                yield from _rows(pa, path, row, batch, columns)
                row += len(batch)
        except (pa.ArrowException, struct.error, OSError) as error:
            raise damaged_table(path, f"behind row {row - 1}: {error}" if row else error) from error


class _Read(NamedTuple):
    """The columns to read; `head`: what is known of targets that are no classes."""

    images: Columns
    head: TargetHead | None = None
    masks: Columns | None = None


def _columns(schema: Any, path: Path, rows: Callable[[], Iterator[Any]]) -> _Read:
    head = of_metadata(schema.metadata, path)
    if head is not None and head.has_vectors:
        return _Read(choose_columns(schema, path, labelled=False), head)
    if (masked := mask_columns(schema, path, FOUND)) is not None:
        image, mask = (choose_columns(schema, path, labelled=False, image=name) for name in masked)
        return _Read(image, masks=mask)
    try:
        return _Read(choose_columns(schema, path))
    except InputError:
        if isinstance(other_targets(path, schema, rows(), FOUND), TableTargets):
            return _Read(choose_columns(schema, path, labelled=False))
        raise


def _rows(
    pa: Any, path: Path, first: int, record_batch: Any, read: _Read
) -> Iterator[ScannedRecord]:
    columns, head, _ = read
    batch = batch_of(pa, record_batch, columns)
    masks = None if read.masks is None else batch_of(pa, record_batch, read.masks)
    num_labels = 1 << 24 if columns.classes is None else len(columns.classes)
    for at, (name, label) in enumerate(zip(batch.paths, batch.labels, strict=True)):
        row = f"row {first + at}" + f" ({name})" * bool(name)
        data = batch.images[at].as_py()
        reason = None if columns.label is None else no_label(label, columns)
        if reason is None and isinstance(label, int) and not 0 <= label < num_labels:
            reason = f"label {label} is no number of a class"
        if reason is not None:
            yield ScannedRecord(row, None, damage=reason, whole=True)
            continue
        class_name: int | str | Tensor | bytes | None = label
        if head is not None:
            try:
                class_name = torch.tensor(
                    packed_vector(record_batch.column(PACKED_COLUMN)[at].as_py(), head)
                )
            except (ValueError, TypeError, KeyError) as error:
                yield ScannedRecord(row, None, damage=f"its labels: {error}", whole=None)
                continue
        if columns.classes is not None and isinstance(label, int):
            class_name = columns.classes[label]
        try:
            image = read_path(path, name) if data is None else data
            if masks is not None:
                mask = masks.images[at].as_py()
                class_name = read_path(path, masks.paths[at]) if mask is None else mask
        except OSError as error:
            yield ScannedRecord(row, None, damage=why_unreadable(error), whole=True)
            continue
        yield ScannedRecord(row, None, image, class_name, record_batch.slice(at, 1))


def _is_full(sizes: Sequence[int]) -> bool:
    return len(sizes) >= _GROUP_ROWS or sum(sizes) >= _GROUP_BYTES


@contextlib.contextmanager
def _sink(kind: str, path: Path, schema: Any) -> Iterator[Callable[[Any], None]]:
    """A function that adds a record batch; in a Parquet file each is a row group, with a CRC-32 per page."""
    if kind == "arrow":
        pa = extra("pyarrow", what=f"writing {kind}")
        with path.open("xb") as file, pa.ipc.new_stream(file, schema) as stream:
            yield stream.write_batch
        return
    parquet = extra("pyarrow.parquet", what=f"writing {kind}")
    with path.open("xb") as file, parquet.ParquetWriter(file, schema, **_PARQUET) as writer:
        yield lambda batch: writer.write_batch(batch, row_group_size=max(1, len(batch)))
