"""`flambeau pack`: images of any source into files of any format, in parallel, resumable after a kill.

Everything is written into a hidden folder beside DST, unit by unit (a shard, or 2,000 images of a folder).
A unit's folder gets its name when it is complete, and is then never written again; the files of all units
get their final names at the end. A file DST.pack.json records how they were made, with a CRC-32 of each
image, which `flambeau verify` compares: most formats have no checksums.
"""

import contextlib
import dataclasses
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import PIL
import simplejpeg
from torch import Tensor

from flambeau.data.pack.encode_images import (
    CannotStore,
    Conversion,
    Layout,
    common_layout,
    layout_of,
)
from flambeau.data.pack.label_vectors import VectorRecords
from flambeau.data.pack.output_files import Packed, PackFiles, name_disk_errors
from flambeau.data.pack.shard_indexes import shard_index_files, write_shard_indexes
from flambeau.data.pack.shard_plan import (
    Split,
    Unit,
    head_of,
    named_parts,
    remarks_on_parts,
    target_kind,
    units_of,
    written_classes,
    written_values,
)
from flambeau.data.pack.single_objects import AT_ONCE, SingleObjectSource
from flambeau.data.pack.store_output import StoreOutput
from flambeau.data.pack.writers import (
    Label,
    Record,
    as_buffer,
    keys_for,
    open_writer,
    require_package,
)
from flambeau.data.sources.masks.mask_file import IGNORED, Mask
from flambeau.data.sources.packed_formats import FORMATS, endings_of
from flambeau.data.sources.packed_targets import mask_text, vector_text
from flambeau.data.sources.source import Source, content_sample, mask_of, mask_problem
from flambeau.data.sources.targets import FOUND, TargetChoice, kind_of_targets
from flambeau.data.stores.address import is_address
from flambeau.errors import DecodeError, InputError, disk_remedy, require_folder
from flambeau.images.decode import Stored
from flambeau.images.stand_ins import why_unreadable
from flambeau.terminal import CountBar

_AHEAD = 4  # images in progress per thread, so that a large one does not block the others

T = TypeVar("T")
R = TypeVar("R")


class _Bad(NamedTuple):
    """An image that cannot be stored: which and why, and the remedy."""

    what: str
    remedy: str

    @classmethod
    def of(cls, image: str, error: Exception) -> "_Bad":
        reason = why_unreadable(error) if isinstance(error, OSError) else str(error)
        if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError):
            return cls(f"{image}: the memory is too small for it", "Give fewer --workers")
        if isinstance(error, CannotStore):
            return cls(f"{image}: {reason}", "Give another --encode, --resize or --center-crop")
        if remedy := disk_remedy(getattr(error, "errno", None)):
            return cls(f"{image}: {reason}", f"{remedy[0].upper()}{remedy[1:]} and pack again")
        return cls(f"{image}: {reason}", "Repair or remove it")


def record_crc(target: str | None, stored: Stored) -> int:
    """CRC-32 of a target as text (None: an ignored vector) and a stored image."""
    return zlib.crc32(as_buffer(stored), zlib.crc32(f"{target}\0".encode()))


def pack(
    src: Path,
    dst: Path,
    how: Conversion,
    split: Split,
    *,
    workers: int,
    skip_bad_images: int = 0,
    download: bool = False,
    fresh: bool = False,
    show: bool = False,
    choice: TargetChoice = FOUND,
) -> Packed:
    """Make DST of SRC, or continue or return an existing one.

    It does not depend on `workers`, the number of threads. `fresh` starts again; finished files are renamed,
    not deleted.
    """
    split.check()
    kind = target_kind(dst)
    target = StoreOutput(dst) if is_address(dst) else None
    dst = dst if target is None else target.local
    _check_destination(src, dst, is_made=target is not None)
    require_package(kind)
    _check_encoding(how.encode, kind)
    parts = named_parts(src, kind, download=download, choice=choice)
    if isinstance(parts[0][1], SingleObjectSource):
        workers = max(workers, AT_ONCE)
    _check_crop(parts, how)
    units = units_of(parts, dst, split)
    remarks = remarks_on_parts(parts, kind)
    classes = written_classes(parts[0][1])
    files = PackFiles(dst, kind, classes, units, _config(kind, parts, how, split))
    made = None if fresh else _finished(files) if target is None else target.finished(files)
    if made is not None:
        return made._replace(remarks=remarks)
    if target is not None:
        target.prepare()
    total = sum(len(unit.indices) for unit in units)
    bar = CountBar(total, unit="images", shown=show, is_kept=True)
    with name_disk_errors(dst, dst.parent), files.locked(), bar:
        if fresh:
            files.set_aside()
            if target is not None:
                target.set_aside(files)
        sources = [source for _, source in parts]
        with _Work(kind, how, sources, workers, skip_bad_images, bar.update) as work:
            work.prepare(files)
            for number, unit in enumerate(units):
                work.write_unit(files, number, unit)
                if target is not None:
                    target.send(files, number)
            output = _published if target is None else target.publish
            made = output(files, work.bad)._replace(remarks=remarks)
    if target is not None:
        target.remove_local()
    return made


def _finished(files: PackFiles) -> Packed | None:
    made = files.finished()
    if made is not None:
        with name_disk_errors(files.dst, files.dst.parent):
            write_shard_indexes(files.finals)
    return made


def _published(files: PackFiles, bad: Sequence[str]) -> Packed:
    for index in shard_index_files(files.finals):
        index.unlink(missing_ok=True)  # of shards that are gone
    made = files.publish(bad)
    write_shard_indexes(files.finals)
    return made


def _config(
    kind: str, parts: Sequence[tuple[str, Source]], how: Conversion, split: Split
) -> dict[str, Any]:
    """Everything that decides the content of the files."""
    head = head_of(parts[0][1])
    return {
        "format": kind,
        "data": [[name, source.fingerprint] for name, source in parts],
        "content": [content_sample(source) for _, source in parts],
        # Other library versions may write other bytes.
        "libraries": f"pillow {PIL.__version__}, simplejpeg {simplejpeg.__version__}",
        **dataclasses.asdict(how),
        **dataclasses.asdict(split),
        **({"targets": head._asdict()} if head.has_vectors else {}),
    }


class _Work:
    """The conversion and writing of all units, and the bad images so far."""

    def __init__(
        self,
        kind: str,
        how: Conversion,
        sources: Sequence[Source],
        workers: int,
        limit: int,
        advance: Callable[[int], object],
    ) -> None:
        self._kind, self._how, self._sources, self._limit = kind, how, sources, limit
        self._keys = [keys_for(kind, source) for source in sources]
        self._heads = [head_of(source) for source in sources]
        self._labels = [_labels_of(source) for source in sources]
        self._mask_numbers = _mask_numbers(sources[0])
        self._layout: Layout | None = None
        self._workers, self._advance = workers, advance
        self.bad: list[str] = []

    def __enter__(self) -> "_Work":
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="pack")
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def prepare(self, files: PackFiles) -> None:
        """Determine the common layout of raw images, unless an earlier start has."""
        plan = files.stored_plan()
        if plan is None:
            plan = self._find_layout() if self._how.encode == "raw" else []
            files.store_plan(plan)
        if plan:
            shape, dtype, channels = plan
            self._layout = Layout(tuple(shape), dtype)
            self._how = dataclasses.replace(self._how, channels=channels)

    def write_unit(self, files: PackFiles, number: int, unit: Unit) -> None:
        done = files.unit_facts(number)
        if done is not None:
            self.bad += done["bad"]
            self._advance(len(unit.indices))
            return
        known = len(self.bad)
        facts: dict[str, Any] = {}
        with files.unit(number, facts) as folder, name_disk_errors(files.dst, folder):
            crcs = self._write(folder / ("" if self._kind == "folder" else unit.file), unit)
            facts["crc32"] = "".join(f"{crc:08x}" for crc in crcs)
            facts["bad"] = self.bad[known:]

    def _write(self, target: Path, unit: Unit) -> list[int]:
        """Write the images of a unit, and return their CRC-32."""
        source = self._sources[unit.part]
        keys = self._keys[unit.part]
        crcs = []
        labels = self._labels[unit.part]
        images = self._map(lambda index: self._convert(source, index), unit.indices)
        with (
            contextlib.closing(images),
            open_writer(self._kind, target, self._layout, self._heads[unit.part]) as write,
        ):
            for index, made in zip(unit.indices, images, strict=True):
                self._advance(1)
                if isinstance(made, _Bad):
                    self._add_bad(made)
                    continue
                image, mask = made
                label = labels[index] if mask is None else mask
                name = source.classes[label] if isinstance(label, int) else ""
                try:
                    write(Record(keys[index], index, label, name, image))
                except CannotStore as error:
                    self._add_bad(_Bad.of(source.describe(index), error))
                    continue
                crcs.append(record_crc(_checked_text(source, name, label), image))
            if not crcs:
                raise InputError(f"{unit.file}: none of its {len(unit.indices)} images can be read")
        return crcs

    def _convert(self, source: Source, index: int) -> tuple[Stored, bytes | None] | _Bad:
        """The image, and its mask if it has one."""
        try:
            if (problem := mask_problem(source, index)) is not None:
                raise DecodeError(problem)
            mask = mask_of(source, index)
            image = self._how.convert(source.read(index))
            if self._layout is not None and Layout.of(image) != self._layout:
                raise DecodeError("its pixels are not what its header says")
            if mask is not None:
                return image, self._how.convert_mask(self._mask_numbers[mask])
        except (OSError, DecodeError, CannotStore, MemoryError) as error:
            return _Bad.of(source.describe(index), error)
        return image, None

    def _add_bad(self, bad: _Bad) -> None:
        if len(self.bad) >= self._limit:
            met = f", and the {self._limit} that are allowed have been met" if self._limit else ""
            raise InputError(f"{bad.what}{met}\n{bad.remedy}, or raise --skip-bad-images")
        self.bad.append(bad.what)

    def _find_layout(self) -> tuple[Any, ...]:
        """Shape, dtype and channels for all images; InputError if they have no common layout."""
        images = [(source, index) for source in self._sources for index in range(len(source))]
        examples: dict[Layout, tuple[Source, int]] = {}
        layouts = self._map(self._layout_or_none, images)
        for image, layout in zip(images, layouts, strict=True):
            if layout is not None:
                examples.setdefault(layout, image)
        if not examples:
            raise InputError(f"none of the {len(images)} images can be read")
        common = common_layout(list(examples))
        if common is None:
            (one, (a, i)), (other, (b, j)) = _two_sizes(examples)
            raise InputError(
                f"{a.describe(i)} is {one}, {b.describe(j)} {other}; an array holds images of one size\n"
                "Give --resize N --center-crop, N at most the shortest side, or --encode keep, or make a .rec"
            )
        layout, channels = common
        return (*layout, channels)

    def _layout_or_none(self, image: tuple[Source, int]) -> Layout | None:
        source, index = image
        try:
            return layout_of(source.read(index), self._how)
        except (OSError, DecodeError):
            return None  # a bad image, which is counted when it is written

    def _map(self, work: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
        return map_in_order(self._pool, work, items, ahead=_AHEAD * self._workers)


def _mask_numbers(source: Source) -> Mask:
    """(256,), the number that is written for each position among the classes; 255 for what is ignored."""
    numbers = np.full(256, IGNORED, np.uint8)
    values = written_values(source)
    numbers[: len(values)] = values
    return numbers


def _checked_text(source: Source, class_name: str, label: Label) -> str | None:
    """What of the label a checksum covers."""
    if isinstance(label, bytes):
        return mask_text(label)
    if isinstance(label, int):
        return class_name
    if isinstance(source, VectorRecords) or not isinstance(label, Tensor):
        return None
    return vector_text(label)


def _labels_of(source: Source) -> Sequence[Label]:
    if isinstance(source, VectorRecords):
        return source.vectors
    if kind_of_targets(source).is_table:
        return [*source.labels]
    return list(source.labels.tolist())


def map_in_order(
    pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], *, ahead: int
) -> Generator[R, None, None]:
    """As `pool.map`, but at most `ahead` items are in progress and in memory."""
    waiting: deque[Future[R]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _check_crop(parts: Sequence[tuple[str, Source]], how: Conversion) -> None:
    if how.center_crop and isinstance(parts[0][1], VectorRecords):
        raise InputError(
            f"{parts[0][1].describe(0)} has several labels, maybe boxes, which a crop would move\n"
            "Leave --center-crop out"
        )


def _check_destination(src: Path, dst: Path, *, is_made: bool) -> None:
    if not dst.name or dst.name.startswith("."):
        raise InputError(f"DST {dst} needs a name that does not begin with a dot")
    if not is_made:
        require_folder(dst)
    if src.is_dir() and dst.resolve().is_relative_to(src.resolve()):
        raise InputError(
            f"{dst} would lie within the data {src}, and be read as part of it the next time\n"
            "Name a place outside"
        )


def _check_encoding(encode: str, kind: str) -> None:
    """InputError if the format cannot hold the encoded images."""
    form = FORMATS[kind]
    if encode == "raw" and not form.is_array:
        raise InputError(
            f"--encode raw makes pixels, and {kind} holds image files\n"
            "Give --encode bmp (not compressed) or png, or pack into "
            f"{endings_of('pixels', 'both')}"
        )
    if encode != "raw" and form.holds == "pixels":
        raise InputError(
            f"--encode {encode} makes image files, and {kind} holds pixels\n"
            f"Give --encode raw, or pack into {endings_of('files', 'both')} or a folder"
        )


def _two_sizes(
    examples: Mapping[Layout, tuple[Source, int]],
) -> list[tuple[str, tuple[Source, int]]]:
    """The first image, and the first of another size."""
    sizes: dict[str, tuple[Source, int]] = {}
    for layout, image in examples.items():
        sizes.setdefault(f"{layout.shape[1]} x {layout.shape[0]}", image)
    return list(sizes.items())[:2]
