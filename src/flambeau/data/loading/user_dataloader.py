"""Batches of a user's DataLoader, with a position in the run and a share for each rank."""

import itertools
import zlib
from collections.abc import Callable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from flambeau.data.loading.batch_samples import (
    count_samples,
    is_tensor_per_sample,
    slice_samples,
    tensors_in_batch,
)
from flambeau.data.loading.loader_place import LoaderPlace
from flambeau.data.loading.micro_batch import MicroBatch, share_of, wait_before_fork
from flambeau.data.loading.sampler_chain import are_shares, first_indices
from flambeau.errors import InputError
from flambeau.recipes.data.sample_order import mix
from flambeau.recipes.setup.seeding import cpu_generators_restored, seed_cpu

_NO_INDICES = np.empty(0, dtype=np.int64)


class UserDataLoader:
    """Batches of the user's own loader, which decides their order.

    Before each epoch the global generators are seeded by (seed, epoch), and any `set_epoch` is called, so
    that a shuffling DataLoader repeats the epoch. A resume in mid-epoch reads and drops earlier batches,
    unless the loader can restore its state. Each rank reads all batches and takes its share of the samples,
    unless a DistributedSampler, at any depth, makes the shares.
    """

    def __init__(
        self,
        batches: Any,
        *,
        accumulate: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        keeps_empty: bool = True,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._rank, self._world, self._keeps_empty = rank, world, keeps_empty
        self.length = len(batches)
        if self.length == 0:
            raise InputError("the loader is empty: there is nothing to train on")
        self._batches, self._accumulate, self._seed = batches, accumulate, seed
        self._listed: bool | None = None
        self._gather = gather
        self.are_shares = are_shares(batches, rank=rank, world=world)
        """Whether each rank gets batches of its own, by a DistributedSampler."""
        self.place = LoaderPlace(
            batches,
            say=say if rank == 0 else lambda text: None,
            restores=world == 1 or not self.are_shares,
        )
        self._must_compare = world > 1 and not self.are_shares
        if self._must_compare:
            indices = first_indices(batches, seed=mix(mix(seed)))
            if indices is not None:
                self._compare(indices)

    @property
    def forks(self) -> bool:
        return getattr(self._batches, "num_workers", 0) > 0

    @property
    def batches_per_epoch(self) -> int:
        """Optimizer steps per epoch, a smaller last one included."""
        return -(-self.length // self._accumulate)

    def batch_indices(self, *, epoch: int, batch: int) -> list[int]:
        """The numbers of the loader's batches in global batch `batch`."""
        low = batch * self._accumulate
        return list(range(low, min(low + self._accumulate, self.length)))

    def describe(self, index: int) -> str:
        return f"batch {index} of the loader"

    def _compare(self, first: Any) -> None:
        """Refuse ranks whose first batches differ: each would take its share of another batch."""
        self._must_compare = False
        everyone = self._gather(first)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise InputError(
                    f"the loader gives rank {rank} another first batch than rank 0, and each rank takes its "
                    "share of what it reads, so some samples would never be trained on\n"
                    "Give the Dataset, or a loader that is alike on all ranks; a sampler or IterableDataset "
                    "that shares the data itself says so by an attribute num_replicas, as DistributedSampler"
                )

    def _read(self, epoch: int, first: int) -> Iterator[Any]:
        """One epoch of the loader, from the batch on before which it stands.

        The generators are seeded before each batch: neither a resume that drops batches nor a training that
        draws between two of them must change the next one, also where a sampler draws while workers read.
        """
        seed = mix(mix(self._seed) + epoch)
        seed_cpu(seed)
        if self.forks:
            wait_before_fork(self._world)
        batches = iter(self._batches)
        for number in itertools.count(first):
            # Else the first batch comes after the sampler's draw, the same with workers; a loader that
            # continues by its state draws more before it.
            if number or self.place.is_stateful:
                seed_cpu(mix(seed + number))
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._must_compare:
                self._compare(_digest(batch))
            yield batch

    def stream(
        self, *, epoch: int, position: int, epochs: int | None = None
    ) -> Iterator[MicroBatch]:
        """Micro-batches from a position on, which counts batches."""
        last = None if epochs is None else epoch + epochs
        is_share = self._world == 1 or self.are_shares
        while epoch != last:
            source = self._entered(epoch, position)
            while group := list(itertools.islice(source, self._accumulate)):
                sized = []
                total = 0
                for number, batch in enumerate(group, start=position):
                    is_listed = self._is_listed(batch, number)
                    whole = len(batch) if is_listed else count_samples(batch)
                    sized.append((batch, whole, is_listed))
                    total += whole
                if is_share:  # DistributedSampler gives all ranks equally many
                    total *= self._world
                stop = position + len(group)
                if stop >= self.length:
                    self._require_end(source, stop)
                self.place.reached(
                    (epoch, stop) if stop < self.length else (epoch + 1, 0), group[-1]
                )
                for part, (batch, whole, is_listed) in enumerate(sized, start=1):
                    position += 1
                    data, size, all_have = (
                        (batch, whole, True) if is_share else self._share(batch, whole, is_listed)
                    )
                    if size or self._keeps_empty:
                        yield MicroBatch(
                            data,
                            _NO_INDICES,
                            size,
                            total,
                            part,
                            position == stop,
                            position == self.length,
                            position,
                            (),
                            all_have,
                            position + (self._rank << 40),
                        )
            if position != self.length:
                raise InputError(
                    f"the loader says it has {self.length} batches and made {position}"
                )
            epoch, position = epoch + 1, 0

    def _entered(self, epoch: int, position: int) -> Iterator[Any]:
        """The batches of an epoch from a position on."""
        first = self.place.enter(epoch, position)
        source = self._read(epoch, first)
        for number in range(first, position):
            batch = next(source, None)
            if batch is None:
                break  # an epoch that has become shorter, which is refused at its end
            if number == position - 1:
                self.place.check((epoch, position), batch)
        return source

    def _require_end(self, source: Iterator[Any], stop: int) -> None:
        """Refuse more batches than the loader says it has: the next epoch would begin with them."""
        with cpu_generators_restored():
            has_more = next(source, None) is not None
        if not has_more and stop == self.length:
            return
        workers = getattr(self._batches, "num_workers", 0)
        dataset = getattr(self._batches, "dataset", None)
        if workers > 1 and isinstance(dataset, IterableDataset):
            raise InputError(
                f"the loader says it has {self.length} batches and makes more: each of its {workers} workers "
                f"reads all of {type(dataset).__name__}, or ends in a smaller batch\nLet it read the share "
                "of torch.utils.data.get_worker_info(), say by __len__ how many batches that makes, or set "
                "num_workers to 1"
            )
        raise InputError(
            f"the loader says it has {self.length} batches and makes more\nLet its __len__ say how many an "
            "epoch has, or end it there, as itertools.islice does"
        )

    def _is_listed(self, batch: Any, number: int) -> bool | None:
        """As `is_tensor_per_sample`; an ambiguous batch is taken to be as the ones before it."""
        loader = self._batches
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            return False
        if loader.collate_fn is default_collate:  # puts all samples into each tensor
            return False
        size, sampler = loader.batch_size, loader.sampler
        if size is None or not isinstance(sampler, Sized):
            return False
        expected = min(size, len(sampler) - number * size)
        result = is_tensor_per_sample(batch, expected)
        if result is not None:
            self._listed = self._listed or result
        elif self._listed is not None or expected < size:
            return self._listed is not False
        return result

    def _share(self, batch: Any, size: int, is_listed: bool | None) -> tuple[Any, int, bool]:
        """This rank's samples of a batch, how many count, and whether every rank has some."""
        local, last = (
            share_of(size, rank=rank, world=self._world, full_size=size)
            for rank in (self._rank, self._world - 1)
        )
        stacked = getattr(self._batches, "collate_fn", None) is default_collate
        data = slice_samples(batch, local or slice(0, 2), stacked=stacked, listed=is_listed)
        return data, local.stop - local.start if local else 0, last is not None


def _digest(batch: Any) -> list[tuple[Any, ...]]:
    """What tells the tensors of two batches apart."""
    tensors = [tensor.detach().cpu().contiguous() for tensor in tensors_in_batch(batch)]
    return [(*t.shape, zlib.crc32(t.view(-1).view(torch.uint8).numpy().data)) for t in tensors]
