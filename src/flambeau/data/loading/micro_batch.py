"""One forward pass worth of samples, as a loader hands it to a run, and each rank's share of it."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_SETTLE_S = 0.01  # threads of gloo need a millisecond; chosen


class MicroBatch(NamedTuple):
    """The samples of one forward pass, and its position in the global batch.

    Fields that are not listed here are those of `batch_layout.Cut`.

    Attributes:
        size: samples in `data` that count: fewer where a data set leaves out what it cannot read; 0 where
            `data` is a stand-in, on a rank without samples.
        position: samples of the epoch that are consumed after it (of UserDataLoader: batches).
        local: which of `indices` are in `data`.
    """

    data: Any
    indices: np.ndarray[Any, np.dtype[np.int64]]
    size: int
    total: int
    part: int
    ends_batch: bool
    ends_epoch: bool
    position: int
    bad: Sequence[int]
    all_have: bool
    draw: int
    local: slice = slice(None)
    dealt: int = 0
    counts_indices: bool = True
    sum_key: int = 0


def share_of(num_samples: int, *, rank: int, world: int, full_size: int) -> slice | None:
    """The samples of a micro-batch that a rank takes; None if there are none left for it.

    Shares differ by at most one sample. No rank takes a single sample, on which BatchNorm cannot train,
    unless a micro-batch of `full_size` gives every rank just one.
    """
    least = 2 if full_size >= 2 * world else 1
    num_taking = max(1, min(world, num_samples // least))
    if rank >= num_taking:
        return None
    size, more = divmod(num_samples, num_taking)
    start = rank * size + min(rank, more)
    return slice(start, start + size + (rank < more))


def wait_before_fork(world: int) -> None:
    """Wait a moment before workers are forked, if several ranks train.

    A thread of gloo enters Python to free a tensor. A process forked at that moment hangs in fork forever:
    it waits for a lock of that thread (CPython 3.11).
    """
    if world > 1:
        time.sleep(_SETTLE_S)
