"""The protocol of a dataset whose randomness comes in as an argument."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset


class SeededDataset(Dataset[Any]):
    """A dataset that makes whole batches and takes the seed of each sample as an argument.

    The loader calls `batch`; for any other `Dataset` it seeds the global generators before each sample.
    """

    alternates = False
    """Whether the signs of the seeds alternate from epoch to epoch, as by `alternating_seeds`."""

    fetches_ahead = False
    """Whether `fetch_ahead` has an effect."""

    in_blocks = False
    """Whether neighbours are parts of one file, and so are read together best."""

    def __len__(self) -> int:
        raise NotImplementedError

    def fetch_ahead(self, indices: NDArray[np.int64]) -> bool:
        """Told the next samples, in order; False if these are enough."""
        return False

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Sequence[int]]:
        """One batch, and the unreadable indices, replaced (training) or left out (evaluation).

        The batch is a tensor, or a tuple of tensors, samples first; augmentation must depend on the sample's
        seed alone; seeds (N,) int64.
        """
        raise NotImplementedError

    def describe(self, index: int) -> str:
        return f"sample {index}"
