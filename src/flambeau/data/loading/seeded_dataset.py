"""The protocol of a dataset whose randomness comes in as an argument."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset


class SeededDataset(Dataset[Any]):
    """A dataset that makes whole batches and takes the seed of each sample as an argument.

    The loader calls `batch`; a plain `Dataset` gets the global generators seeded per sample instead.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[Any, Sequence[int]]:
        """Make one batch.

        Args:
            indices: (N,) int64, positions in the dataset.
            seeds: (N,) int64, one seed per sample: all that its augmentation may depend on.

        Returns:
            The batch (a tensor, or a tuple of tensors whose first dimension counts samples), and the
            indices that could not be read and were replaced (training) or left out (evaluation).
        """
        raise NotImplementedError

    def describe(self, index: int) -> str:
        """What to call a sample in a message, such as its path."""
        return f"sample {index}"
