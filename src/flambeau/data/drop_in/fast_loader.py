"""A DataLoader over images, read several times faster; what comes out is what came out before."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from flambeau.data.drop_in.batch_memory import BatchMemory, SpareMemory
from flambeau.data.drop_in.interception import forget_plans, install
from flambeau.data.drop_in.known_datasets import TakenOver, taken_over
from flambeau.data.drop_in.packed_copy import PackedCopy
from flambeau.data.drop_in.sample import Sample, making
from flambeau.data.drop_in.stacking import collate_in_place
from flambeau.data.images.decode import Stored
from flambeau.data.images.thread_pool import DecodePool
from flambeau.data.loading.prefetch_thread import read_ahead
from flambeau.recipes.data.sample_order import mix


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
    def stored(self) -> Callable[[Any], Stored | None] | None:
        """Gives the image of a path, where it is in another place."""
        return None if self.packed is None else self.packed.find


class FastLoader:
    """Iterates like the DataLoader that it was made of; every other attribute is that loader's.

    Args:
        loader: as the user has made it.
        options: how it is read.
    """

    def __init__(self, loader: DataLoader[Any], options: FastOptions) -> None:
        self.loader, self.options = loader, options
        self.found: TakenOver = taken_over(loader.dataset)
        self._in_workers: DataLoader[Any] | None = None
        self._base: int | None = None
        self._spare = SpareMemory()

    @property
    def is_taken_over(self) -> bool:
        """Whether anything is read by us: not of an IterableDataset, and not sample by sample."""
        return (
            not isinstance(self.loader.dataset, IterableDataset)
            and self.loader.batch_sampler is not None
        )

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

    def __iter__(self) -> Iterator[Any]:
        if not self.is_taken_over:
            return iter(self.loader)
        install()
        forget_plans()
        self.found = taken_over(self.loader.dataset)
        batches = _with_seeds(self.loader.batch_sampler or (), self._next_base())
        if self._workers:
            return map(self._placed, self._by_workers(batches))
        if self.reads_in_threads:
            return self._by_threads(batches)
        return map(self._placed, map(self._read_here, batches))

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

    def _by_threads(self, batches: Iterable["_Batch"]) -> Iterator[Any]:
        pool = DecodePool(self.options.threads)
        loader = self.loader
        depth = max(2, loader.num_workers * (loader.prefetch_factor or 2) // 2)
        return read_ahead(batches, lambda batch: self._read_in_threads(batch, pool), depth=depth)

    def _read_in_threads(self, batch: "_Batch", pool: DecodePool) -> Any:
        loader, options = self.loader, self.options
        in_place = loader.collate_fn is default_collate
        pinned = loader.pin_memory and torch.cuda.is_available()
        spare = None if pinned else self._spare
        memory = BatchMemory(len(batch), spare, channels_last=options.channels_last)
        # A data set's own code behind the transforms must see what they give.
        raw = options.device is not None and in_place and self.found.is_complete
        samples: list[Any] = [None] * len(batch)

        def read(number: int) -> None:
            index, seed = batch[number]
            sample = Sample(
                seed, number, memory if in_place else None, raw=raw, stored=options.stored
            )
            with making(sample):
                samples[number] = loader.dataset[index]

        pool.each(len(batch), read)
        if in_place:
            return self._placed(collate_in_place(samples, memory, options.device))
        return self._placed(loader.collate_fn(samples))

    # ------------------------------------------------------------ by processes, or here

    def _by_workers(self, batches: Iterable["_Batch"]) -> Iterator[Any]:
        loader = self.loader
        if self._in_workers is None:
            self._in_workers = DataLoader(
                _SeededSamples(loader.dataset, self.options),
                batch_sampler=_Once(), collate_fn=loader.collate_fn,
                num_workers=self._workers, pin_memory=loader.pin_memory, timeout=loader.timeout,
                worker_init_fn=loader.worker_init_fn, prefetch_factor=loader.prefetch_factor,
                multiprocessing_context=loader.multiprocessing_context,
                persistent_workers=loader.persistent_workers,
                generator=torch.Generator(),
            )  # fmt: skip
        sampler = self._in_workers.batch_sampler
        assert isinstance(sampler, _Once)
        sampler.batches = batches
        return iter(self._in_workers)

    def _read_here(self, batch: "_Batch") -> Any:
        states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
        try:
            samples = _SeededSamples(self.loader.dataset, self.options).__getitems__(batch)
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.random.set_rng_state(states[2])
        return self.loader.collate_fn(samples)

    def _placed(self, batch: Any) -> Any:
        """On the device and in the memory format that were asked for."""
        device, channels_last = self.options.device, self.options.channels_last
        if device is None and not channels_last:
            return batch

        def place(leaf: Tensor) -> Tensor:
            if device is not None:
                leaf = leaf.to(device, non_blocking=True)
            if channels_last and leaf.ndim == 4 and leaf.is_floating_point():
                leaf = leaf.contiguous(memory_format=torch.channels_last)
            return leaf

        return tree_map_only(Tensor, place, batch)


_Batch = list[tuple[Any, int]]  # indices of the data set, and seeds


def _with_seeds(batches: Iterable[Any], base: int) -> Iterator[_Batch]:
    """Each sample of an epoch gets random numbers of its own, by its place in the order."""
    place, base = 0, mix(base)
    for batch in batches:
        yield [(index, mix(base + place + number)) for number, index in enumerate(batch)]
        place += len(batch)


class _Once:
    """A batch sampler for one epoch after the other, each put into `batches` before it begins."""

    def __init__(self) -> None:
        self.batches: Iterable[_Batch] = ()

    def __iter__(self) -> Iterator[_Batch]:
        return iter(self.batches)


class _SeededSamples(Dataset[Any]):
    """Samples by index and seed; the generators of the process are seeded before each."""

    def __init__(self, dataset: Dataset[Any], options: FastOptions) -> None:
        self._dataset, self._options = dataset, options

    def __getitems__(self, batch: _Batch) -> list[Any]:
        install()  # in a worker that was not forked it is not there yet
        return [self._sample(index, seed) for index, seed in batch]

    def _sample(self, index: Any, seed: int) -> Any:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed % 2**63)
        with making(Sample(seed, stored=self._options.stored)):
            return self._dataset[index]
