"""A data set whose batches also contain the indices of their samples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.loading.seeded_dataset import SeededDataset


class WithIndices(SeededDataset):
    """The evaluation batches of a data set as (images, targets, indices), indices (N,) int64 on the host."""

    def __init__(self, data: ImageDataset | DeviceDataset) -> None:
        self._data = data
        self.device = getattr(data, "device", None)  # loaders need to know where batches are made

    def __len__(self) -> int:
        return len(self._data)

    def describe(self, index: int) -> str:
        return self._data.describe(index)

    def batch(
        self, indices: Tensor, seeds: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Sequence[int]]:
        (images, targets), bad = self._data.batch(indices, seeds)
        if bad:
            indices = indices[~torch.isin(indices, torch.tensor(bad))]
        return (images, targets, indices), bad
