"""Blocks: runs of neighbouring samples that are fetched, kept and shuffled together."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 8 << 20
"""About the size of a block: large enough that the latency of a request costs little."""


MAX_GROUP_BLOCKS = 4
"""Of a row group that counts as one block, at most; chosen: `flambeau pack` writes 100 images into each."""


def block_lengths(sizes: NDArray[Any], shard_lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The number of samples in each block, in order.

    A block never crosses shards, and holds as many samples as begin within 8 MiB.

    Args:
        sizes: (N,) bytes of each sample.
        shard_lengths: samples of each shard, N together.
    """
    lengths: list[NDArray[np.int64]] = []
    start = 0
    for count in np.asarray(shard_lengths, np.int64).tolist():
        if count:
            of_shard = np.asarray(sizes[start : start + count], np.int64)
            number = (np.cumsum(of_shard) - of_shard) // BLOCK_BYTES
            edges = np.flatnonzero(np.diff(number, prepend=-1))
            lengths.append(np.diff(edges, append=count).astype(np.int64))
        start += count
    return np.concatenate(lengths) if lengths else np.zeros(0, np.int64)


def group_blocks(sizes: NDArray[Any], group_lengths: NDArray[Any]) -> NDArray[np.int64]:
    """As `block_lengths`, of a file whose groups of samples are fetched whole: small ones are blocks.

    Args:
        sizes: (N,) bytes of each sample.
        group_lengths: samples of each group, N together.
    """
    ends = np.cumsum(group_lengths)
    total = np.concatenate([[0], np.cumsum(sizes)])
    lengths = [
        np.array([count])
        if total[end] - total[end - count] <= MAX_GROUP_BLOCKS * BLOCK_BYTES
        else block_lengths(sizes[end - count : end], np.array([count]))
        for end, count in zip(ends.tolist(), np.asarray(group_lengths).tolist(), strict=True)
        if count
    ]
    return np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
