"""Which samples make up which batch, from any epoch and position on."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Sampler

from flambeau.data.loading.batch_layout import Cut, Layout

_MOST_ANNOUNCED = 256  # batches: what is known of each takes some kilobytes

Indices = np.ndarray[Any, np.dtype[np.int64]]
EpochOrder = np.ndarray[Any, np.dtype[np.int32 | np.int64]]


@runtime_checkable
class Order(Protocol):
    """An order of samples, as a function of the epoch; see flambeau.recipes.data.samplers."""

    def __len__(self) -> int: ...

    def order(self, epoch: int) -> torch.Tensor:
        """(len,) int64 or int32 on the CPU: indices of samples."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What a worker is to read; in NumPy, because a tensor would travel through shared memory.

    `indices` (N,) are of all ranks of the forward pass. `draws` (N,) seed the samples: the index, or another
    number if the epoch repeats it.
    """

    epoch: int
    indices: Indices
    draws: Indices
    total: int
    cut: Cut


class BatchPlan(Sampler[BatchPart]):
    """The parts of the batches in order, from a position on. A Sampler because DataLoader needs one.

    Args:
        stream_of: see `BlockSampler`. A forward pass's samples are grouped by stream, so that a rank, whose
            share is a slice, reads few.
        epoch, position: where to begin: samples of the epoch that are consumed.
        skip: consumed forward passes of the first global batch.
    """

    def __init__(
        self,
        layout: Layout,
        order: Callable[[int], EpochOrder],
        *,
        repeats: bool,
        length: int,
        epoch: int,
        position: int,
        skip: int = 0,
        epochs: int | None,
        stream_of: Indices | None = None,
    ) -> None:
        self._layout, self._order, self._length = layout, order, length
        self._epoch, self._position, self._epochs = epoch, position, epochs
        self._repeats, self._skip = repeats, skip
        self._stream_of = stream_of

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
                for cut in itertools.islice(self._layout.cut(position, stop), skip, None):
                    chosen = self._grouped(order, cut.low, cut.high)
                    # Wide again: the indices seed random numbers, and an order may be in 32 bits.
                    indices = order[chosen].astype(np.int64)
                    drawn = draws[chosen].astype(np.int64)
                    yield BatchPart(epoch, indices, drawn, stop - position, cut)
                position = stop
                skip = 0
            epoch, position = epoch + 1, 0

    def _grouped(self, order: EpochOrder, low: int, high: int) -> slice | Indices:
        """The places of a forward pass, by stream if there are several."""
        if self._stream_of is None:
            return slice(low, high)
        places = np.arange(low, high)
        # By index within a stream: where two ranks share one, most of its blocks are of one of them alone.
        streams = self._stream_of[places % len(self._stream_of)]
        return places[np.lexsort((order[low:high], streams))]


class AnnouncedPlan(Sampler[BatchPart]):
    """A plan whose samples of this rank are made known some batches before they are read.

    `announce` takes the next indices, in order, and returns False if they are enough for now.
    """

    def __init__(self, plan: Sampler[BatchPart], announce: Callable[[Indices], bool]) -> None:
        self._plan, self._announce = plan, announce

    def __iter__(self) -> Iterator[BatchPart]:
        waiting: deque[BatchPart] = deque()
        parts = iter(self._plan)
        may_go_on = True
        nothing = np.zeros(0, np.int64)
        while True:
            may_go_on = may_go_on or self._announce(nothing)
            while not waiting or (may_go_on and len(waiting) < _MOST_ANNOUNCED):
                part = next(parts, None)
                if part is None:
                    break
                waiting.append(part)
                may_go_on = self._announce(part.indices[part.cut.local])
            if not waiting:
                return
            yield waiting.popleft()


def share_sizes(length: int, layout: Layout) -> list[int]:
    """The distinct numbers of samples that this rank gets at once, in order."""
    plan = BatchPlan(
        layout,
        lambda epoch: np.arange(length),
        repeats=False,
        length=length,
        epoch=0,
        position=0,
        epochs=1,
    )
    return list(dict.fromkeys(part.cut.local.stop - part.cut.local.start for part in plan))


def _numbered(order: EpochOrder) -> Indices:
    """A number for each position of an order: the sample's index, raised for each earlier occurrence.

    An index that an epoch repeats is augmented differently each time.
    """
    by_index = np.argsort(order, kind="stable")
    starts = np.flatnonzero(np.diff(order[by_index], prepend=-1))
    before = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    numbered = order.astype(np.int64)  # a copy
    numbered[by_index] += before * (int(order.max()) + 1)
    return numbered
