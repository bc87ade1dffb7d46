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
from typing import Any

import torch
from torch import Tensor

from flambeau.data.pack.salvage_records import ScannedRecord
from flambeau.data.sources.packed_targets import TargetHead, as_metadata, of_metadata
from flambeau.data.sources.tables.arrow_file import (
    Batch,
    arrow_batches,
    batch_of,
    damaged_table,
    no_label,
    read_path,
)
from flambeau.data.sources.tables.columns import Columns, choose_columns
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
    classes = {"names": list(head.names), "_type": "ClassLabel"}
    if not head.has_vectors:
        return "label", pa.int64(), classes
    if head.separator is not None:
        return PACKED_COLUMN, pa.list_(pa.int64()), {"feature": classes, "_type": "List"}
    value = {"dtype": "float32", "_type": "Value"}
    return PACKED_COLUMN, pa.list_(pa.float32()), {"feature": value, "_type": "List"}


def _cell(label: int | float | Tensor, head: TargetHead) -> Any:
    """A label as `packed_vector` reads it; null for an unknown value."""
    if not isinstance(label, Tensor):
        return label
    if head.separator is not None:
        return label.nonzero()[:, 0].tolist()
    return [None if math.isnan(value) else value for value in label.tolist()]


@contextlib.contextmanager
def open_table_writer(
    kind: str, path: Path, head: TargetHead
) -> Iterator[Callable[[bytes, str, int | float | Tensor], None]]:
    """A function that adds image file, name and label to a new table, complete when the context ends."""
    pa = extra("pyarrow", what=f"writing {kind}")
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
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

        def write(data: bytes, name: str, label: int | float | Tensor) -> None:
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
    """The rows of a table in its order; after damage a Parquet file continues at the next row group."""
    return _walk_parquet(path) if kind == "parquet" else _walk_arrow(path)


def _walk_parquet(path: Path) -> Iterator[ScannedRecord]:
    pa = extra("pyarrow", what=f"{path}")
    table = open_table(path)
    columns, head = _columns(table.schema_arrow, path, lambda: all_rows(path, table))
    row = 0
    for group in range(table.num_row_groups):
        end = row + table.metadata.row_group(group).num_rows
        try:
            for batch in row_batches(path, table, group, table.schema_arrow.names):
                yield from _rows(path, row, batch, batch_of(pa, batch, columns), columns, head)
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
            columns, head = _columns(schema, path, lambda: arrow_batches(pa, path, buffer)[1])
            for batch in batches:
                batch.validate(full=True)
                yield from _rows(path, row, batch, batch_of(pa, batch, columns), columns, head)
                row += len(batch)
        except (pa.ArrowException, struct.error, OSError) as error:
            raise damaged_table(path, f"behind row {row - 1}: {error}" if row else error) from error


def _columns(
    schema: Any, path: Path, rows: Callable[[], Iterator[Any]]
) -> tuple[Columns, TargetHead | None]:
    """The columns to read, and what is known of targets that are no classes."""
    head = of_metadata(schema.metadata, path)
    if head is not None and head.has_vectors:
        return choose_columns(schema, path, labelled=False), head
    try:
        return choose_columns(schema, path), None
    except InputError:
        if isinstance(other_targets(path, schema, rows(), FOUND), TableTargets):
            return choose_columns(schema, path, labelled=False), None
        raise


def _rows(
    path: Path,
    first: int,
    record_batch: Any,
    batch: Batch,
    columns: Columns,
    head: TargetHead | None,
) -> Iterator[ScannedRecord]:
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
        class_name: int | str | Tensor | None = label
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
