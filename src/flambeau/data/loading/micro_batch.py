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
        size: samples in `data` that count: without unreadable ones; 0 if `data` is a stand-in, on a rank
            without samples.
        position: samples of the epoch consumed after it (of UserDataLoader: batches).
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
    """A rank's samples of a micro-batch; None if there are none.

    Shares differ by at most one. No rank takes a single sample, on which BatchNorm cannot train, unless
    `full_size` gives every rank just one.
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

    A process forked while a thread of gloo frees a tensor hangs forever: it waits for that thread's lock
    (CPython 3.11).
    """
    if world > 1:
        time.sleep(_SETTLE_S)
