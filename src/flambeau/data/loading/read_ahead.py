"""The protocol of a data set that wants to know which of its samples are read next, and in which order."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flambeau.data.loading.batch_plan import Order
from flambeau.data.loading.seeded_dataset import SeededDataset
from flambeau.data.loading.stream_order import NeighboursByTurns


@runtime_checkable
class ReadAhead(Protocol):
    """A map-style data set whose samples are far away.

    Attributes:
        in_blocks: neighbours are parts of one file, best read together.
    """

    fetches_ahead: bool
    in_blocks: bool

    def fetch_ahead(self, indices: NDArray[np.int64]) -> bool:
        """Told the next samples, in order; False if these are enough."""

    def describe(self, index: int) -> str:
        """The name of a sample in messages."""

    def sampler(self, seed: int) -> Order | None:
        """The order in which it is read best; None: a permutation of all samples."""


def own_order(data: Any, seed: int) -> Order | None:
    """The order that a data set asks for; None if it leaves that open."""
    return data.sampler(seed) if isinstance(data, ReadAhead) else None


def evaluation_order(data: Any) -> Order | None:
    """The order in which ranks evaluate, each its own blocks; None: that of the data."""
    is_own = isinstance(data, SeededDataset | ReadAhead)
    return NeighboursByTurns(len(data)) if is_own and data.in_blocks else None
