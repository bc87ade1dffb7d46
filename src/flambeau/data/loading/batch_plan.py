"""Which samples make up which batch, and which part of a batch a worker is asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Sampler

from flambeau.data.loading.loader import Loader
from flambeau.data.loading.micro_batch import (
    share_of,
)


class Order(Protocol):
    """An order of samples that is a function of the epoch; see flambeau.recipes.data.samplers."""

    def __len__(self) -> int: ...

    def order(self, epoch: int) -> torch.Tensor:
        """(len,) int64 on the CPU: indices of samples."""


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What a worker is asked for; NumPy, because a tensor would travel through shared memory."""

    epoch: int
    indices: np.ndarray[Any, np.dtype[np.int64]]
    own: slice
    is_stand_in: bool
    total: int
    part: int
    ends_batch: bool
    position: int
    all_have: bool
    draw: int


class BatchPlan(Sampler[BatchPart]):
    """The parts in order. A Sampler only because DataLoader wants one."""

    def __init__(self, loader: Loader, epoch: int, position: int, epochs: int | None) -> None:
        self._loader, self._start, self._position, self._epochs = loader, epoch, position, epochs

    def __iter__(self) -> Iterator[BatchPart]:
        it, epoch = self._loader, self._start
        position = self._position
        while self._epochs is None or epoch < self._start + self._epochs:
            order = it.order(epoch)
            while position < it.length:
                stop = min(position + it._global, it.length)
                low, part = position, 0
                while low < stop:
                    part += 1
                    left = stop - low
                    # A lone last sample joins the part before it: BatchNorm cannot train on one.
                    joins = left == it._micro + 1 > 2
                    high = stop if joins else min(low + it._micro, stop)
                    own, last = (
                        share_of(high - low, rank=rank, world=it._world, usual=it._micro)
                        for rank in (it._rank, it._world - 1)
                    )
                    if own is not None or it._keeps_empty:
                        yield BatchPart(
                            epoch, order[low:high], own or slice(0, 2), own is None, stop - position,
                            part, high == stop, high, last is not None,
                            low + own.stop if own else high,
                        )  # fmt: skip
                    low = high
                position = stop
            epoch, position = epoch + 1, 0
