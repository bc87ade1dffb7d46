"""Orders whose samples come by turns from streams, of which each rank of a run reads a few."""

from typing import Protocol, runtime_checkable

import torch

from flambeau.recipes.data.samplers import spread, stream_edges

STREAMS = 48
"""Which 2, 3, 4, 6, 8, 12, 16, 24 and 48 ranks divide. Each stream has blocks of its own in use: with more
streams the first batch, of 256, would wait for more blocks: of 70 images for 52, with 16 streams for 43."""
EARLIER_STREAMS = 16
"""Of runs that began when there were so many."""


@runtime_checkable
class InStreams(Protocol):
    """An order in streams, see `BlockSampler`: `stream_of` each place, modulo `streams`."""

    stream_of: torch.Tensor


class NeighboursByTurns:
    """Samples in streams of neighbours: an evaluation of which each rank reads some."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.stream_of = spread(STREAMS)

    def __len__(self) -> int:
        return self._length

    def order(self, epoch: int) -> torch.Tensor:
        """(len,) int64 on the CPU: indices of samples, the same in all epochs."""
        edges = stream_edges(self._length, self.stream_of).tolist()
        order = torch.empty(self._length, dtype=torch.int64)
        for turn, stream in enumerate(self.stream_of.tolist()):
            order[turn::STREAMS] = torch.arange(edges[stream], edges[stream + 1])
        return order
