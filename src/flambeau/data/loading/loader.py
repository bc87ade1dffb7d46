"""Batches in an order that depends on (seed, epoch, length) alone, from any position on.

The order of an epoch is a permutation; a global batch is a slice of it, a micro-batch a slice of the global
batch, and each rank reads a slice of the micro-batch, which is grouped by stream where the order has several.
Ranks and workers change who reads a sample, never its batch or its augmentation.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, default_collate

from flambeau.data.loading.background_reader import prefetch
from flambeau.data.loading.batch_layout import Layout
from flambeau.data.loading.batch_plan import AnnouncedPlan, BatchPart, BatchPlan, EpochOrder, Order
from flambeau.data.loading.batch_samples import count_samples
from flambeau.data.loading.micro_batch import MicroBatch, wait_before_fork
from flambeau.data.loading.read_ahead import ReadAhead
from flambeau.data.loading.seeded_dataset import SeededDataset
from flambeau.data.loading.stream_order import InStreams
from flambeau.data.loading.workers.processes import (
    Restarts,
    Workers,
    block_signals,
    preserve_errors,
)
from flambeau.data.loading.workers.progress import defer_worker_deaths, reading
from flambeau.data.loading.workers.transport import Uncollated, has_room, pinned, received, to_send
from flambeau.errors import InputError, WorkerLost
from flambeau.recipes.data.sample_order import alternating_seeds, sample_order, sample_seeds
from flambeau.recipes.setup.seeding import cpu_generators_restored, seed_cpu


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How samples are read. Only `collate` changes what is in a batch.

    Attributes:
        pin_memory: batches in page-locked memory, for asynchronous copies; not of batches made on a device.
        stall_timeout: seconds a worker may read one sample before it counts as lost; 0 is never.
        ahead: batches of a SeededDataset that a thread prefetches without workers; None is 2 with
            `pin_memory`, else 0.
    """

    workers: int = 0
    collate: Callable[[list[Any]], Any] = default_collate
    pin_memory: bool = False
    stall_timeout: float = 60.0
    ahead: int | None = None
    restarts: Restarts = field(default_factory=Restarts)


_DEFAULT = ReadOptions()

# Of the process's generators, for loaders that are read in several threads.
_SEEDED = threading.RLock()


class Loader:
    """Reads micro-batches of a map-style dataset, in this process or in workers.

    Args:
        dataset: a SeededDataset, or any map-style Dataset, for which torch's, NumPy's and random's global
            generators are seeded by (seed, epoch, index) before each sample; where a sampler repeats an
            index, also by the repetition.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        layout: Layout,
        *,
        seed: int = 0,
        shuffle: bool = True,
        sampler: Order | None = None,
        reading: ReadOptions = _DEFAULT,
        on_bad: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.length = len(dataset if sampler is None else sampler)  # type: ignore[arg-type]
        if self.length == 0:
            raise InputError("the dataset is empty: there is nothing to train on")
        if shuffle and layout.micro_batch_size < layout.min_size:
            raise InputError(
                f"a batch of {layout.micro_batch_size} cannot be shared by {layout.world} processes: "
                "batch_size counts the samples of all of them together; make it "
                f"{layout.world} or more"
            )
        self._layout, self._seed, self._shuffle = layout, seed, shuffle
        self._dataset, self._on_bad, self._sampler = dataset, on_bad, sampler
        self._pins, self._ahead = _pins_and_ahead(dataset, reading)
        self._reading = reading
        self._workers = self._new_workers()
        self._fetch = _Fetch(dataset, seed, reading.collate, reading.workers)

    def _new_workers(self) -> Workers:
        # A stall must be reported before the other ranks time out, who would name only the rank.
        early = 0.8 if self._layout.world > 1 else 1.0
        return Workers(
            self._reading.workers,
            stall_timeout=early * self._reading.stall_timeout,
            describe=self.describe,
        )

    @property
    def are_shares(self) -> bool:
        """Never here: the ranks share each micro-batch."""
        return False

    @property
    def forks(self) -> bool:
        return self._workers.count > 0

    @property
    def batches_per_epoch(self) -> int:
        """Global batches (optimizer steps) per epoch, a smaller last one included."""
        return -(-self.length // self._layout.global_batch_size)

    @property
    def last_batch_size(self) -> int:
        """Samples of the last global batch of an epoch."""
        return self.length - (self.batches_per_epoch - 1) * self._layout.global_batch_size

    def batch_indices(self, *, epoch: int, batch: int) -> list[int]:
        """The samples of global batch `batch` of an epoch, in order."""
        size = self._layout.global_batch_size
        return list(map(int, self.order(epoch)[batch * size : (batch + 1) * size]))

    @property
    def stacks(self) -> bool:
        """Whether each tensor of a batch holds all of its samples."""
        is_seeded = isinstance(self._dataset, SeededDataset)
        return is_seeded or self._reading.collate is default_collate

    @property
    def layout(self) -> Layout:
        return self._layout

    def set_micro_batches(self, size: int) -> None:
        """Divide the global batches into micro-batches of `size` samples from now on."""
        self._layout = self._layout.with_micro_batches(size)

    def describe(self, index: int) -> str:
        if isinstance(self._dataset, SeededDataset | ReadAhead):
            return self._dataset.describe(index)
        return f"sample {index}"

    def order(self, epoch: int) -> EpochOrder:
        if self._sampler is not None:
            return self._sampler.order(epoch).numpy()
        if self._shuffle:
            return sample_order(self.length, seed=self._seed, epoch=epoch).numpy()
        return np.arange(self.length)

    def _stream_of(self) -> np.ndarray[Any, np.dtype[np.int64]] | None:
        """The stream of each place, modulo their number, of an order that has several."""
        found = self._sampler.stream_of if isinstance(self._sampler, InStreams) else None
        return None if found is None or len(found) == 1 else found.numpy()

    def stream(
        self, *, epoch: int, position: int, epochs: int | None = None
    ) -> Iterator[MicroBatch]:
        """Micro-batches from a position on, epoch after epoch, also prefetched across epochs."""
        last = None if epochs is None else epoch + epochs
        skip = 0
        while True:
            plan = BatchPlan(
                self._layout,
                self.order,
                repeats=self._sampler is not None,
                length=self.length,
                epoch=epoch,
                position=position,
                skip=skip,
                epochs=None if last is None else last - epoch,
                stream_of=self._stream_of(),
            )
            try:
                for micro in self._micro_batches(plan):
                    # Where new workers begin, if these are lost.
                    skip += 1
                    if micro.ends_batch:
                        epoch, position, skip = *self._next_batch(epoch, position), 0
                    yield micro
                return
            except WorkerLost as error:
                self._reading.restarts.take(error)
                self._workers = self._new_workers()

    def _next_batch(self, epoch: int, position: int) -> tuple[int, int]:
        """Epoch and position of the global batch after the one that begins here."""
        end = position + self._layout.global_batch_size
        return (epoch, end) if end < self.length else (epoch + 1, 0)

    def _micro_batches(self, plan: BatchPlan) -> Iterator[MicroBatch]:
        with contextlib.closing(self._fetched(self._announced(plan))) as parts:
            for part, data, size, bad in parts:
                if isinstance(data, InputError):
                    raise data
                if bad and self._on_bad is not None:
                    self._on_bad(bad)
                cut = part.cut
                yield MicroBatch(
                    self._fetch.unpacked(data),
                    part.indices,
                    size,
                    part.total,
                    cut.part,
                    cut.ends_batch,
                    cut.position == self.length,
                    cut.position,
                    bad,
                    cut.all_have,
                    cut.draw,
                    cut.local,
                    cut.dealt,
                    cut.counts_indices,
                    cut.sum_key,
                )

    def _announced(self, plan: BatchPlan) -> Sampler[BatchPart]:
        dataset = self._dataset
        if not isinstance(dataset, SeededDataset | ReadAhead) or not dataset.fetches_ahead:
            return plan
        return AnnouncedPlan(plan, dataset.fetch_ahead)

    def _fetched(self, plan: Sampler[BatchPart]) -> Generator["_Fetched"]:
        """The parts, read in order by workers, by a thread, or here."""
        if self._workers.count or not isinstance(self._dataset, SeededDataset):
            yield from self._through_torch(plan)
        elif self._ahead:
            yield from prefetch(
                plan, self._fetch_here, depth=self._ahead, start=_start_on(self._pins)
            )
        else:
            yield from map(self._fetch_here, plan)

    def _fetch_here(self, part: BatchPart) -> "_Fetched":
        part, data, size, bad = self._fetch[part]
        return part, pinned(data) if self._pins else data, size, bad

    def _through_torch(self, plan: Sampler[BatchPart]) -> Iterator["_Fetched"]:
        with block_signals(), warnings.catch_warnings():
            # More workers than cores is the user's choice; torch would warn at every evaluation.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            loader = DataLoader(
                self._fetch,
                sampler=plan,
                batch_size=None,
                collate_fn=_as_it_is,
                **self._workers.settings,
                # The loader draws a base seed, which must not come from the generator of the training.
                generator=torch.Generator(),
                pin_memory=self._pins,
            )
            if self._workers.count:
                wait_before_fork(self._layout.world)
            with self._workers.starting():
                batches = iter(loader)  # forks the workers
            defer_worker_deaths()
        try:
            yield from self._workers.watched(batches)
        finally:
            # The last reference: the workers end now, not when a traceback that holds this frame is freed.
            del batches


def _device_of(dataset: Dataset[Any]) -> torch.device | None:
    """The device on which batches are made; None for the CPU."""
    device = getattr(dataset, "device", None) if isinstance(dataset, SeededDataset) else None
    return None if device is None or torch.device(device).type == "cpu" else torch.device(device)


def _pins_and_ahead(dataset: Dataset[Any], options: ReadOptions) -> tuple[bool, int]:
    """Whether batches are pinned, and how many batches a thread prefetches."""
    workers = options.workers
    ahead = options.ahead
    held_on = _device_of(dataset)
    if held_on is not None and workers:
        raise InputError(
            f"the data are held on {held_on}: no process can read them, workers must be 0"
        )
    if ahead and (workers or held_on is not None or not isinstance(dataset, SeededDataset)):
        raise InputError(
            f"ahead = {ahead} is for a SeededDataset that is read on the CPU without workers"
        )
    pins = options.pin_memory and held_on is None and torch.accelerator.is_available()
    # If the CPU also computes, a thread gains nothing: resnet18, 64 px, two cores, 232 ms per step without
    # and 241 ms with it (medians of 5).
    return pins, (2 if pins else 0) if ahead is None else ahead


def _start_on(pins: bool) -> Callable[[], object]:
    """What the reading thread calls first: memory is pinned for the device that is current here."""
    if not pins:
        return lambda: None
    device = torch.accelerator.current_device_index()
    return functools.partial(torch.accelerator.set_device_index, device)


_Fetched = tuple[BatchPart, Any, int, Sequence[int]]


class _Fetch(Dataset[Any]):
    """Reads a part as (part, batch, samples in it, bad indices); runs in the workers."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate: Callable[[list[Any]], Any], workers: int
    ) -> None:
        self._dataset, self._seed, self._collate = dataset, seed, collate
        self._workers = workers

    def __getitem__(self, part: BatchPart) -> _Fetched:
        part, data, size, bad = self._read(part)
        if self._workers:
            data = to_send(data, workers=self._workers)
        # What a stand-in cannot read is reported by the rank whose samples these are.
        return (part, data, 0, ()) if part.cut.is_stand_in else (part, data, size, bad)

    def _read(self, part: BatchPart) -> _Fetched:
        indices = torch.from_numpy(part.indices[part.cut.local])
        size = len(indices)
        # A subclass may have its own __getitem__.
        if type(self._dataset) is TensorDataset and self._collate is default_collate:
            return part, tuple(t[indices] for t in self._dataset.tensors), size, ()
        draws = torch.from_numpy(part.draws[part.cut.local])
        alternates = isinstance(self._dataset, SeededDataset) and self._dataset.alternates
        seeds_of = alternating_seeds if alternates else sample_seeds
        seeds = seeds_of(draws, seed=self._seed, epoch=part.epoch)
        if isinstance(self._dataset, SeededDataset):
            first = int(indices[0])
            try:
                with reading(first), preserve_errors(f"batch of sample {first}", self._workers):
                    batch, bad = self._dataset.batch(indices, seeds)
            except InputError as error:
                # Returned: if it were raised, it would arrive wrapped in a worker's traceback.
                return part, error, 0, ()
            return part, batch, count_samples(batch), bad
        # A worker has them for itself, and may be forked while a thread holds the lock.
        with contextlib.nullcontext() if self._workers else _SEEDED, cpu_generators_restored():
            samples = []
            for index, seed in zip(indices.tolist(), seeds.tolist(), strict=True):
                seed_cpu(seed)
                try:
                    with reading(index), preserve_errors(f"sample {index}", self._workers):
                        samples.append(self._dataset[index])
                except InputError as error:
                    return part, error, 0, ()
            what = f"the batch of {_samples_text(indices.tolist())}"
            with preserve_errors(what, self._workers):
                return part, self.collated(samples), size, ()

    def unpacked(self, data: Any) -> Any:
        data = received(data)
        return self._collate(data.samples) if isinstance(data, Uncollated) else data

    def collated(self, samples: list[Any]) -> Any:
        """A batch; or the samples themselves if shared memory has no room for the batch."""
        # Torch would leave an empty file in /dev/shm for each batch that does not fit.
        if self._workers and not has_room(samples, workers=self._workers):
            return Uncollated(samples)
        try:
            return self._collate(samples)
        except RuntimeError as error:
            if self._workers and "shared memory" in str(error):
                return Uncollated(samples)
            raise


def is_dataset(data: object) -> TypeGuard[Dataset[Any]]:
    """Whether samples can be read by index; otherwise it is a loader of ready batches."""
    return hasattr(data, "__getitem__") or isinstance(data, SeededDataset)


def _as_it_is(batch: Any) -> Any:
    return batch


def _samples_text(indices: Sequence[int]) -> str:
    """Names the samples of a batch that could not be collated: one of them has another shape."""
    more = f" and {len(indices) - 16} more" if len(indices) > 16 else ""
    return f"samples {', '.join(map(str, indices[:16]))}{more}"
