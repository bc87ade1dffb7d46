"""What a loader hands to a run: one forward pass worth of samples, and which of them are this rank's."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_SETTLE_S = 0.01  # for threads that need a millisecond; chosen


class MicroBatch(NamedTuple):
    """One forward pass worth of samples, and its place in the global batch.

    Attributes:
        data: what the dataset makes of the samples of this rank, collated.
        indices: (N,) int64, which samples were asked for, by all ranks together.
        size: samples in `data` that count: fewer where a data set leaves out what it cannot read, and none
            on a rank for which there was nothing left: its data are a stand-in.
        total: samples of the global batch that it is a part of.
        part: its number in the global batch, from 1.
        ends_batch: no micro-batch of this global batch follows.
        ends_epoch: no micro-batch of this epoch follows.
        position: where the epoch stands after it, in samples (of UserDataLoader: in batches).
        bad: indices that could not be read.
        all_have: whether each rank has samples that count.
        draw: a number that no other batch of the epoch has, to seed what is drawn for it.
        own: which of `indices` are in `data`.
        dealt: parts of the global batch, where these are always the same, whatever the ranks; else 0.
        counts_indices: none of `indices` was in an earlier micro-batch of this global batch.
        sum_key: what is logged of micro-batches with the same number is added up together, in their order.
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
    own: slice = slice(None)
    dealt: int = 0
    counts_indices: bool = True
    sum_key: int = 0


def share_of(num_samples: int, *, rank: int, world: int, usual: int) -> slice | None:
    """The part of a micro-batch that a rank takes; None where there is nothing left for it.

    Parts differ by one sample at most. Nobody takes a lone sample, on which BatchNorm cannot train, unless
    that is what every rank has in a usual micro-batch.

    Args:
        num_samples: of the micro-batch.
        rank: in [0, world).
        world: number of ranks.
        usual: samples of a usual micro-batch.
    """
    least = 2 if usual >= 2 * world else 1
    taking = max(1, min(world, num_samples // least))
    if rank >= taking:
        return None
    size, more = divmod(num_samples, taking)
    start = rank * size + min(rank, more)
    return slice(start, start + size + (rank < more))


def settle_before_fork(world: int) -> None:
    """Call it before workers are forked, where several ranks train.

    A thread of gloo's enters Python to drop a tensor. A process that is forked while it does stays in fork
    for ever: it waits for a lock of that thread's (CPython 3.11).
    """
    if world > 1:
        time.sleep(_SETTLE_S)
