"""The protocol of a data set that wants to know which of its samples are read next, and in which order."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flambeau.data.loading.batch_plan import Order


@runtime_checkable
class ReadAhead(Protocol):
    """A map-style data set whose samples are far away.

    Attributes:
        fetches_ahead: whether `fetch_ahead` has an effect.
    """

    fetches_ahead: bool

    def fetch_ahead(self, indices: NDArray[np.int64]) -> bool:
        """Told which samples come next, in order; False if these are enough for now."""

    def describe(self, index: int) -> str:
        """The name of a sample in messages."""

    def sampler(self, seed: int) -> Order | None:
        """The order in which it is read best; None: a permutation of all samples."""


def own_order(data: Any, seed: int) -> Order | None:
    """The order that a data set asks for; None if it leaves that open."""
    return data.sampler(seed) if isinstance(data, ReadAhead) else None
