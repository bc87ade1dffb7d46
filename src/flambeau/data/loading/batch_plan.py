"""Which samples make up which batch, from any epoch and position on, and which part a worker is asked for."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Sampler

from flambeau.data.loading.micro_batch import share_of
from flambeau.recipes.parallel.fixed_order_sum import parts_of

Indices = np.ndarray[Any, np.dtype[np.int64]]


@runtime_checkable
class Order(Protocol):
    """An order of samples that is a function of the epoch; see flambeau.recipes.data.samplers."""

    def __len__(self) -> int: ...

    def order(self, epoch: int) -> torch.Tensor:
        """(len,) int64 on the CPU: indices of samples."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What a worker is asked for; NumPy, because a tensor would travel through shared memory.

    Attributes:
        draws: what seeds each sample: its index, and another number where it comes again in the epoch.
        dealt: parts of the global batch, where these are always the same, whatever the ranks; else 0.
    """

    epoch: int
    indices: Indices
    draws: Indices
    own: slice
    is_stand_in: bool
    total: int
    part: int
    ends_batch: bool
    position: int
    all_have: bool
    draw: int
    dealt: int = 0


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How samples are grouped into batches and shared by processes.

    Attributes:
        micro_batch_size: samples per forward pass, of all ranks together.
        accumulate: micro-batches per optimizer step.
        rank: of this process.
        world: how many processes read together.
        keeps_empty: a rank for which no sample is left gets a stand-in, so that it takes part in the step.
        step_samples: samples per optimizer step, if they are no multiple of `micro_batch_size`: the last
            micro-batch of each step is smaller then.
        parts: into which a global batch is always cut, whoever computes them; each of them is a micro-batch
            then. None cuts it into micro-batches and these among the ranks.
    """

    micro_batch_size: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    keeps_empty: bool = True
    step_samples: int | None = None
    parts: int | None = None

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.step_samples or self.micro_batch_size * self.accumulate

    @property
    def num_parts(self) -> int:
        """Micro-batches of a whole global batch."""
        if self.parts is not None:
            return self.parts
        return -(-self.global_batch_size // self.micro_batch_size)

    def with_micro_batches(self, size: int) -> "BatchLayout":
        """The same global batches in micro-batches of another size."""
        return dataclasses.replace(self, micro_batch_size=size, step_samples=self.global_batch_size)


class BatchPlan(Sampler[BatchPart]):
    """The parts of the batches in order, from a point on. A Sampler only because DataLoader needs one.

    Args:
        layout: of the batches.
        order: the samples of an epoch, (length,) int64.
        repeats: a sample may come several times in an epoch.
        length: samples per epoch.
        epoch, position: the point: an epoch, and samples of it that are already consumed.
        skip: parts of the batch there that are consumed too.
        epochs: how many in all; None for ever.
    """

    def __init__(
        self,
        layout: BatchLayout,
        order: Callable[[int], Indices],
        *,
        repeats: bool,
        length: int,
        epoch: int,
        position: int,
        skip: int = 0,
        epochs: int | None,
    ) -> None:
        self._layout, self._order, self._length = layout, order, length
        self._epoch, self._position, self._epochs = epoch, position, epochs
        self._repeats, self._skip = repeats, skip

    def __iter__(self) -> Iterator[BatchPart]:
        epoch = self._epoch
        position = self._position
        size = self._layout.global_batch_size
        skip = self._skip
        while self._epochs is None or epoch < self._epoch + self._epochs:
            order = self._order(epoch)
            draws = _numbered(order) if self._repeats else order
            while position < self._length:
                stop = min(position + size, self._length)
                yield from itertools.islice(
                    self._parts(epoch, (order, draws), position, stop), skip, None
                )
                position = stop
                skip = 0
            epoch, position = epoch + 1, 0

    def _parts(
        self, epoch: int, samples: tuple[Indices, Indices], start: int, stop: int
    ) -> Iterator[BatchPart]:
        """The parts of one global batch, the samples from `start` to `stop` of the order and its draws."""
        order, draws = samples
        layout = self._layout
        low = start
        part = 0
        if layout.parts is not None:
            yield from self._dealt(epoch, samples, start, stop)
            return
        usual = layout.micro_batch_size
        while low < stop:
            part += 1
            left = stop - low
            # A lone last sample joins the part before it: BatchNorm cannot train on one.
            joins = left == usual + 1 > 2
            high = stop if joins else min(low + usual, stop)
            own, last = (
                share_of(high - low, rank=rank, world=layout.world, usual=usual)
                for rank in (layout.rank, layout.world - 1)
            )
            if own is not None or layout.keeps_empty:
                yield BatchPart(
                    epoch,
                    order[low:high],
                    draws[low:high],
                    own or slice(0, 2),
                    own is None,
                    stop - start,
                    part,
                    high == stop,
                    high,
                    last is not None,
                    low + own.stop if own else high,
                )
            low = high

    def _dealt(
        self, epoch: int, samples: tuple[Indices, Indices], start: int, stop: int
    ) -> Iterator[BatchPart]:
        """This rank's of the parts into which a global batch is always cut; the last moves the position."""
        layout = self._layout
        (order, draws) = samples
        parts = layout.num_parts
        shares = [
            share_of(stop - start, rank=part, world=parts, usual=layout.global_batch_size)
            for part in range(parts)
        ]
        there = [share for share in shares if share is not None]
        own = parts_of(layout.rank, layout.world, parts)
        mine: list[slice | None] = [*there[own.start : own.stop]]
        if not mine and layout.keeps_empty:
            mine = [None]
        for part, share in enumerate(mine, start=1):
            is_last = part == len(mine)
            yield BatchPart(
                epoch,
                order[start:stop],
                draws[start:stop],
                share or slice(0, 2),
                share is None,
                stop - start,
                part,
                is_last,
                stop if is_last else start,
                True,
                start + share.stop if share else stop,
                len(there),
            )


def share_sizes(length: int, layout: BatchLayout) -> list[int]:
    """How many samples this rank gets at once: each number once, in the order of an epoch of `length`."""
    plan = BatchPlan(
        layout,
        lambda epoch: np.arange(length),
        repeats=False,
        length=length,
        epoch=0,
        position=0,
        epochs=1,
    )
    return list(dict.fromkeys(part.own.stop - part.own.start for part in plan))


def _numbered(order: Indices) -> Indices:
    """The index of each sample, and beyond all of them where it was there before: as often as that."""
    by_index = np.argsort(order, kind="stable")
    starts = np.flatnonzero(np.diff(order[by_index], prepend=-1))
    before = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    numbered = order.copy()
    numbered[by_index] += before * (int(order.max()) + 1)
    return numbered
