"""A DataLoader over images, read several times faster; what comes out is what came out before."""

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from flambeau.data.drop_in.batch_memory import BatchMemory, SpareMemory
from flambeau.data.drop_in.interception import forget_plans, install
from flambeau.data.drop_in.known_datasets import TakenOver, taken_over
from flambeau.data.drop_in.packed_copy import PackedCopy
from flambeau.data.drop_in.sample_context import Sample, making
from flambeau.data.drop_in.seeded_samples import (
    Batch,
    FindStored,
    SeededSamples,
    StartWorker,
    reads_whole_batches,
    seed_of_collating,
    whole_batch,
)
from flambeau.data.drop_in.stacking import collate_in_place
from flambeau.data.loading.background_reader import prefetch
from flambeau.images.thread_pool import DecodePool
from flambeau.recipes.data.sample_order import mix
from flambeau.recipes.setup.seeding import cpu_generators_restored, seed_cpu


@dataclass(frozen=True)
class FastOptions:
    """How a loader is read.

    Attributes:
        threads: that read; None for the CPUs of this process.
        workers: processes that read instead of threads; None for the loader's own, where threads will not do.
        channels_last: batches of images in that memory format.
        device: where batches go; levels cross the bus and are normalized there.
        packed: where the images are read instead of their own files.
    """

    threads: int | None = None
    workers: int | None = None
    channels_last: bool = False
    device: torch.device | None = None
    packed: PackedCopy | None = None

    @property
    def stored(self) -> FindStored | None:
        """Gives the image of a path, where it is in another place."""
        return None if self.packed is None else self.packed.find


class FastLoader:
    """Iterates like the DataLoader that it was made of; every other attribute is that loader's.

    Args:
        loader: as the user has made it.
        options: how it is read.
    """

    def __init__(self, loader: DataLoader[Any], options: FastOptions) -> None:
        self._within: FastLoader | None = None
        base = vars(loader).get("base_dataloader")  # what a loader of Accelerate's iterates
        if isinstance(base, DataLoader):
            self._within = base if isinstance(base, FastLoader) else FastLoader(base, options)
            loader = copy(loader)
            vars(loader)["base_dataloader"] = self._within
        self.loader, self.options = loader, options
        self.found: TakenOver = taken_over(loader.dataset)
        self._in_workers: DataLoader[Any] | None = None
        self._base: int | None = None
        self._spare = SpareMemory()

    @property
    def is_taken_over(self) -> bool:
        """Whether anything is read by us: not of an IterableDataset, and not sample by sample."""
        loader = self.loader
        has_batches = loader.batch_sampler is not None
        return (
            has_batches and not isinstance(loader.dataset, IterableDataset) and not self._iterates
        )

    @property
    def _iterates(self) -> bool:
        """Whether the loader's class iterates in a way of its own."""
        return type(self.loader).__iter__ is not DataLoader.__iter__

    @property
    def reads_in_threads(self) -> bool:
        """Threads need that nothing draws from the generators of the process, which training draws from."""
        return self.options.threads is not None or self.found.is_complete

    @property
    def _workers(self) -> int:
        """Processes that read; 0 for threads, or this process alone."""
        if self.options.workers is not None:
            return self.options.workers
        return 0 if self.reads_in_threads else self.loader.num_workers

    def report(self) -> str:
        """One line: what is ours now, what is as it was, and who reads."""
        if self._within is not None:
            return self._within.report()
        if self._iterates:
            return f"nothing is taken over: {type(self.loader).__name__} has an __iter__ of its own"
        if not self.is_taken_over:
            return "nothing is taken over: the loader has no batches of a data set with indices"
        who = "threads" if self.reads_in_threads else "the training process"
        if self._workers:
            who = f"{self._workers} worker process{'es' * (self._workers > 1)}"
        if self.options.packed is not None:
            who += " out of the packed copy"
        return f"{self.found.describe()}; read by {who}"

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is being made or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Settings of the loader, its `collate_fn` say, are set there."""
        if "loader" in vars(self) and name in vars(self.loader):
            setattr(self.loader, name, value)
        else:
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]  # which object has as an attribute
    def __class__(self) -> Any:
        """So that `isinstance(fast(loader), DataLoader)`: Accelerate and Lightning divide only such a one."""
        return self.loader.__class__

    def __reduce__(self) -> Any:
        """Copies, and those that are unpickled, start workers and memory of their own."""
        return FastLoader, (self.loader, self.options)

    def __iter__(self) -> Iterator[Any]:
        if not self.is_taken_over:
            return iter(self.loader)
        install()
        forget_plans()
        self.found = taken_over(self.loader.dataset)
        assert self.loader.batch_sampler is not None
        indices = iter(self.loader.batch_sampler)  # may draw, as in torch's before the base
        base = self._next_base()
        batches = _with_seeds(indices, base)
        if self._workers:
            return map(self._placed, self._by_workers(batches, base))
        if self.reads_in_threads:
            return self._by_threads(batches)
        return map(self._read_here, batches)

    def _next_base(self) -> int:
        """Of an epoch's seeds: drawn where torch's own loader draws, so that the sampler's order stays.

        That is before each epoch, but with persistent workers before the first one alone.
        """
        if self._base is not None and self.loader.persistent_workers:
            self._base = mix(self._base)
        else:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            self._base = int(drawn)
        return self._base

    # ------------------------------------------------------------ by threads

    def _by_threads(self, batches: Iterable[Batch]) -> Iterator[Any]:
        pool = DecodePool(self.options.threads)
        loader = self.loader
        depth = max(2, loader.num_workers * (loader.prefetch_factor or 2) // 2)

        def read(batch: Batch) -> Callable[[], Any]:
            try:
                return self._read_in_threads(batch, pool)
            except Exception as error:  # raised where it is asked for, and the epoch goes on
                return _raising(error)

        return map(_call, prefetch(batches, read, depth=depth))

    def _read_in_threads(self, batch: Batch, pool: DecodePool) -> Callable[[], Any]:
        """What gives the batch, called in the thread of the training."""
        memory = self._memory(len(batch))
        if memory is None:
            samples = self._samples(batch, pool, None)
            return lambda: self._placed(self._collated(samples, batch))
        ready = self._collated_in_place(memory, lambda: self._samples(batch, pool, memory))
        return lambda: ready

    def _samples(self, batch: Batch, pool: DecodePool, memory: BatchMemory | None) -> Any:
        dataset = self.loader.dataset
        stored = self.options.stored
        # A data set's own code behind the transforms must see what they give.
        raw = self.found.is_complete and self.found.pipelines == 1
        raw = raw and memory is not None and self.options.device is not None
        samples: list[Any] = [None] * len(batch)

        def read(number: int) -> None:
            index, seed = batch[number]
            with making(Sample(seed, number, memory, raw=raw, stored=stored)):
                samples[number] = dataset[index]

        if batch and reads_whole_batches(dataset):
            with making(Sample(batch[0][1], None, memory, stored=stored)):
                return whole_batch(dataset, batch)
        pool.each(len(batch), read)
        return samples

    # ------------------------------------------------------------ batches

    def _memory(self, count: int) -> BatchMemory | None:
        """Where the images of a batch go; None where a function of the user's makes the batch."""
        if self.loader.collate_fn is not default_collate:
            return None
        spare = None if self._pins else self._spare
        return BatchMemory(count, spare, channels_last=self.options.channels_last)

    def _collated_in_place(self, memory: BatchMemory, read: Callable[[], Any]) -> Any:
        """The batch of the samples that are read, which lie in the memory already."""
        collated = collate_in_place(read(), memory, self.options.device)
        # Now only the data set can hold a sample, in a cache say.
        if self.found.code and memory.is_held:
            collated = tree_map_only(Tensor, torch.clone, collated)
        return self._placed(collated)

    # ------------------------------------------------------------ by processes, or here

    def _by_workers(self, batches: Iterable[Batch], base: int) -> Iterator[Any]:
        loader = self.loader
        if self._in_workers is None or not loader.persistent_workers:
            self._in_workers = DataLoader(
                SeededSamples(loader.dataset, self.options.stored),
                batch_sampler=_Once(),
                collate_fn=loader.collate_fn,
                num_workers=self._workers,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                worker_init_fn=StartWorker(loader.worker_init_fn),
                prefetch_factor=loader.prefetch_factor,
                in_order=loader.in_order,
                multiprocessing_context=loader.multiprocessing_context,
                persistent_workers=loader.persistent_workers,
                generator=torch.Generator().manual_seed(base % 2**63),  # of the workers' own seeds
            )
        sampler = self._in_workers.batch_sampler
        assert isinstance(sampler, _Once)
        sampler.batches = batches
        return iter(self._in_workers)

    def _read_here(self, batch: Batch) -> Any:
        samples = SeededSamples(self.loader.dataset, self.options.stored)
        memory = self._memory(len(batch))
        with cpu_generators_restored():
            if memory is not None:
                return self._collated_in_place(memory, lambda: samples.read(batch, memory))
            found = samples.read(batch)
        return self._placed(self._collated(found, batch))

    def _collated(self, samples: list[Any], batch: Batch) -> Any:
        """By the user's function, in the training's thread: it may draw from the process's generators."""
        with cpu_generators_restored():
            seed_cpu(seed_of_collating(batch))
            return self.loader.collate_fn(samples)

    @property
    def _pins(self) -> bool:
        """Whether batches lie in page-locked memory."""
        return self.loader.pin_memory and torch.cuda.is_available()

    def _placed(self, batch: Any) -> Any:
        """On the device and in the memory format that were asked for."""
        device, channels_last = self.options.device, self.options.channels_last
        if device is None and self._pins:
            batch = pin_memory(batch)  # workers' batches are, and stay
        if device is None and not channels_last:
            return batch

        def place(leaf: Tensor) -> Tensor:
            if device is not None:
                leaf = leaf.to(device, non_blocking=True)
            if channels_last and leaf.ndim == 4 and leaf.is_floating_point():
                leaf = leaf.contiguous(memory_format=torch.channels_last)
            return leaf

        return tree_map_only(Tensor, place, batch)


def _with_seeds(batches: Iterable[Any], base: int) -> Iterator[Batch]:
    """Each sample of an epoch gets random numbers of its own, by its place in the order."""
    place, base = 0, mix(base)
    for batch in batches:
        seeded = [(index, mix(base + place + number)) for number, index in enumerate(batch)]
        yield seeded
        place += len(seeded)


def _raising(error: Exception) -> Callable[[], Any]:
    def give() -> Any:
        raise error

    return give


def _call(give: Callable[[], Any]) -> Any:
    return give()


class _Once:
    """A batch sampler for one epoch after the other, each put into `batches` before it begins."""

    def __init__(self) -> None:
        self.batches: Iterable[Batch] = ()

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)
