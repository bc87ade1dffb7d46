"""A DataLoader over images, read several times faster, with the same batches."""

import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from flambeau.data.drop_in.batch_memory import BatchMemory, SpareMemory, collate_in_place
from flambeau.data.drop_in.interception import Plans, install
from flambeau.data.drop_in.known_datasets import (
    Takeover,
    inspect_dataset,
    settings_of_dataset,
)
from flambeau.data.drop_in.packed_copy import PackedCopy
from flambeau.data.drop_in.sample_context import SAMPLES, FindStored, Sample, making
from flambeau.data.drop_in.seeded_samples import (
    Batch,
    Collate,
    SeededSamples,
    StartWorker,
    reads_whole_batches,
    seed_of_collating,
    whole_batch,
)
from flambeau.data.drop_in.transform_kinds import are_same
from flambeau.data.loading.background_reader import prefetch
from flambeau.images.thread_pool import DecodePool
from flambeau.recipes.data.sample_order import mix
from flambeau.recipes.setup.seeding import cpu_generators_restored, seed_cpu


@dataclass(frozen=True)
class FastOptions:
    """How a loader is read; `workers`: processes; None for its own, if threads are unsafe."""

    threads: int | None = None
    workers: int | None = None
    channels_last: bool = False
    device: torch.device | None = None
    packed: PackedCopy | None = None

    @property
    def stored(self) -> FindStored | None:
        """Returns the image of a path from the packed copy."""
        return None if self.packed is None else self.packed.find


class FastLoader:
    """Iterates like the DataLoader it was made from, which gives every other attribute."""

    def __init__(self, loader: DataLoader[Any], options: FastOptions) -> None:
        self._inner: FastLoader | None = None
        base = vars(loader).get("base_dataloader")  # the loader inside one of Accelerate's
        if isinstance(base, DataLoader):
            self._inner = base if isinstance(base, FastLoader) else FastLoader(base, options)
            loader = copy(loader)
            vars(loader)["base_dataloader"] = self._inner
        self.loader, self.options = loader, options
        self.takeover: Takeover = inspect_dataset(loader.dataset)
        self._in_workers: DataLoader[Any] | None = None
        self._base: int | None = None
        self._spare = SpareMemory()
        self._counts = Counter[str]()
        self._lock = threading.Lock()

    @property
    def is_taken_over(self) -> bool:
        """Whether anything is read by us: not an IterableDataset, and not single samples."""
        loader = self.loader
        has_batches = loader.batch_sampler is not None
        return (
            has_batches and not isinstance(loader.dataset, IterableDataset) and not self._iterates
        )

    @property
    def _iterates(self) -> bool:
        """Whether the loader's class overrides __iter__."""
        return type(self.loader).__iter__ is not DataLoader.__iter__

    @property
    def reads_in_threads(self) -> bool:
        """Whether threads read: nothing may draw from the process's generators."""
        return self.options.threads is not None or self.takeover.is_complete

    @property
    def _workers(self) -> int:
        """Number of processes that read; 0 for threads, or for this process alone."""
        if self.options.workers is not None:
            return self.options.workers
        return 0 if self.reads_in_threads else self.loader.num_workers

    def report(self) -> str:
        """One line: what was taken over so far, what ran as it is, and who reads."""
        if self._inner is not None:
            return self._inner.report()
        if self._iterates:
            return f"nothing is taken over: {type(self.loader).__name__} has an __iter__ of its own"
        if not self.is_taken_over:
            return "nothing is taken over: the loader has no batches of a data set with indices"
        who = "threads" if self.reads_in_threads else "the training process"
        if self._workers:
            who = f"{self._workers} worker process{'es' * (self._workers > 1)}"
        if self.options.packed is not None:
            who += " out of the packed copy"
        return f"{self.takeover.describe(self._counts)}; read by {who}"

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being made or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings of the loader, such as `collate_fn`, are set on the loader."""
        if "loader" in vars(self) and name in vars(self.loader):
            setattr(self.loader, name, value)
        else:
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]  # object has it as an attribute
    def __class__(self) -> Any:
        """Makes it a DataLoader for `isinstance`: Accelerate and Lightning shard only those."""
        return self.loader.__class__

    def __reduce__(self) -> Any:
        """Copies and unpickled ones start their own workers and memory."""
        return FastLoader, (self.loader, self.options)

    def __iter__(self) -> Iterator[Any]:
        if not self.is_taken_over:
            return iter(self.loader)
        install()
        self.takeover = inspect_dataset(self.loader.dataset)
        assert self.loader.batch_sampler is not None
        indices = iter(self.loader.batch_sampler)  # may draw: as in torch, before the base seed
        base = self._next_base()
        batches = _with_seeds(indices, base)
        if self._workers:
            return map(self._received, self._by_workers(batches, base))
        if self.reads_in_threads:
            return self._by_threads(batches)
        return map(self._read_here, batches)

    def _next_base(self) -> int:
        """The base of an epoch's seeds, drawn where torch's loader draws it, so that the order stays.

        That is before each epoch, or with persistent workers before the first one only.
        """
        if self._base is not None and self.loader.persistent_workers:
            self._base = mix(self._base)
        else:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            self._base = int(drawn)
        return self._base

    def _count(self, counts: Counter[str]) -> None:
        with self._lock:
            self._counts += counts

    # ------------------------------------------------------------ by threads

    def _by_threads(self, batches: Iterable[Batch]) -> Iterator[Any]:
        pool = DecodePool(self.options.threads)
        loader = self.loader
        depth = max(2, loader.num_workers * (loader.prefetch_factor or 2) // 2)
        # Workers have copies of the transforms, without them every change counts from the next batch on.
        copied = loader.num_workers > 0
        plans: Plans = WeakKeyDictionary()
        known = settings_of_dataset(loader.dataset)

        def read(batch: Batch) -> Callable[[], Any]:
            nonlocal plans, known
            if copied:
                return self._read_in_threads(batch, pool, plans)
            settings = settings_of_dataset(loader.dataset)
            if not are_same(settings, known):
                self.takeover = inspect_dataset(loader.dataset)
                plans = WeakKeyDictionary()
                known = settings
            if not self.reads_in_threads:
                return lambda: self._read_here(batch)
            # Code of the data set's own may change a transform from sample to sample.
            ready = self._read_in_threads(batch, pool, plans if self.takeover.is_complete else None)
            return lambda: self._given(batch, ready, settings)

        return map(operator.call, prefetch(batches, read, depth=depth))

    def _given(self, batch: Batch, ready: Callable[[], Any], settings: list[Any]) -> Any:
        """What was read ahead with these settings of the transforms; read again if they are others now."""
        if are_same(settings, settings_of_dataset(self.loader.dataset)):
            return ready()
        self.takeover = inspect_dataset(self.loader.dataset)
        return self._read_here(batch)

    def _read_in_threads(
        self, batch: Batch, pool: DecodePool, plans: Plans | None
    ) -> Callable[[], Any]:
        """A function that returns the batch; it is called in the training's thread."""
        memory = self._memory(len(batch))
        try:
            if memory is None:
                samples = self._samples(batch, pool, None, plans)
                return lambda: self._moved(self._collated(samples, batch))
            ready = self._collated_in_place(
                memory, lambda: self._samples(batch, pool, memory, plans)
            )
            return lambda: ready
        except Exception as error:  # raised in its position; the epoch can continue
            return _raising(error)

    def _samples(
        self, batch: Batch, pool: DecodePool, memory: BatchMemory | None, plans: Plans | None
    ) -> Any:
        dataset = self.loader.dataset
        stored = self.options.stored
        # The data set's code after the transforms must see their results.
        raw = self.takeover.is_complete and self.takeover.pipelines == 1
        raw = raw and memory is not None and self.options.device is not None
        samples: list[Any] = [None] * len(batch)
        counts = [Counter[str]() for _ in batch]

        def read(number: int) -> None:
            index, seed = batch[number]
            sample = Sample(
                seed, number, memory, raw=raw, stored=stored, plans=plans, counts=counts[number]
            )
            with making(sample):
                samples[number] = dataset[index]

        if batch and reads_whole_batches(dataset):
            with making(
                Sample(batch[0][1], None, memory, stored=stored, plans=plans, counts=counts[0])
            ):
                samples = whole_batch(dataset, batch)
            counts[0][SAMPLES] = len(batch)
        else:
            pool.each(len(batch), read)
        self._count(sum(counts, Counter()))
        return samples

    # ------------------------------------------------------------ batches

    def _memory(self, count: int) -> BatchMemory | None:
        """Memory for the images of a batch; None if the user's function collates."""
        if self.loader.collate_fn is not default_collate:
            return None
        spare = None if self._pins else self._spare
        return BatchMemory(count, spare, channels_last=self.options.channels_last)

    def _collated_in_place(self, memory: BatchMemory, read: Callable[[], Any]) -> Any:
        """The batch of samples that already lie in the memory."""
        collated = collate_in_place(read(), memory, self.options.device)
        # The code of the data set or of a transform may still hold a sample, for example in a cache.
        if not self.takeover.is_complete and memory.is_held:
            collated = tree_map_only(Tensor, torch.clone, collated)
        return self._moved(collated)

    # ------------------------------------------------------------ by processes, or here

    def _by_workers(self, batches: Iterable[Batch], base: int) -> Iterator[Any]:
        loader = self.loader
        if self._in_workers is None or not loader.persistent_workers:
            self._in_workers = DataLoader(
                SeededSamples(loader.dataset, self.options.stored),
                batch_sampler=_Once(),
                collate_fn=cast(Any, Collate(loader.collate_fn)),
                num_workers=self._workers,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=StartWorker(loader.worker_init_fn),
                prefetch_factor=loader.prefetch_factor,
                in_order=loader.in_order,
                multiprocessing_context=loader.multiprocessing_context,
                persistent_workers=loader.persistent_workers,
                generator=torch.Generator().manual_seed(base % 2**63),  # for the workers' base seed
            )
        sampler = self._in_workers.batch_sampler
        assert isinstance(sampler, _Once)
        sampler.batches = batches
        return iter(self._in_workers)

    def _received(self, from_worker: tuple[Any, Counter[str]]) -> Any:
        batch, counts = from_worker
        self._count(Counter(counts))
        return self._moved(batch)

    def _read_here(self, batch: Batch) -> Any:
        samples = SeededSamples(self.loader.dataset, self.options.stored)
        memory = self._memory(len(batch))
        counts = Counter[str]()
        with cpu_generators_restored():
            if memory is not None:
                ready = self._collated_in_place(memory, lambda: samples.read(batch, counts, memory))
                self._count(counts)
                return ready
            collected = samples.read(batch, counts)
        self._count(counts)
        return self._moved(self._collated(collected, batch))

    def _collated(self, samples: list[Any], batch: Batch) -> Any:
        """The user's `collate_fn`, in the training's thread; it may draw from the process's generators."""
        with cpu_generators_restored():
            seed_cpu(seed_of_collating(batch))
            return self.loader.collate_fn(samples)

    @property
    def _pins(self) -> bool:
        """Whether batches lie in page-locked memory."""
        return self.loader.pin_memory and torch.cuda.is_available()

    def _moved(self, batch: Any) -> Any:
        """The batch on the requested device, in the requested memory format."""
        device, channels_last = self.options.device, self.options.channels_last
        if device is None and self._pins:
            batch = pin_memory(batch)  # batches of workers are pinned already, and stay
        if device is None and not channels_last:
            return batch

        def move(leaf: Tensor) -> Tensor:
            if device is not None:
                leaf = leaf.to(device, non_blocking=True)
            if channels_last and leaf.ndim == 4 and leaf.is_floating_point():
                leaf = leaf.contiguous(memory_format=torch.channels_last)
            return leaf

        return tree_map_only(Tensor, move, batch)


def _with_seeds(batches: Iterable[Any], base: int) -> Iterator[Batch]:
    """Gives each sample a seed that depends on its position in the epoch."""
    position, base = 0, mix(base)
    for batch in batches:
        seeded = [(index, mix(base + position + number)) for number, index in enumerate(batch)]
        yield seeded
        position += len(seeded)


def _raising(error: Exception) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give


class _Once:
    """A batch sampler that yields what was put into `batches` before the epoch."""

    def __init__(self) -> None:
        self.batches: Iterable[Batch] = ()

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)
