"""A small data set decoded once and held on the device, augmented there batch by batch.

As in Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024 (arXiv:2404.00498).

S: side in pixels, N: images, C: channels, H: height, W: width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flambeau.data.datasets.image_dataset import SMALL_SIDE, ImageDataset, pixel_type
from flambeau.data.datasets.image_statistics import probe
from flambeau.data.loading.seeded_dataset import SeededDataset
from flambeau.data.sources.source import Source
from flambeau.data.sources.targets import task_of
from flambeau.data.transforms.crops import TrainingCrop
from flambeau.errors import InputError
from flambeau.recipes.data.batch_crop_flip import batch_crop_flip

# Of the device's memory: 330,000 images of 32 x 32 x 3. Chosen: small beside a model on any current GPU.
HELD_BYTES = 1 << 30


def can_hold(
    source: Source, *, image_size: int, channels: int, limit_bytes: int = HELD_BYTES
) -> bool:
    """Whether a `DeviceDataset` can hold these images: small, of this size, within the limit."""
    size = len(source) * image_size**2 * channels * pixel_type(source).itemsize
    if size > limit_bytes or image_size > SMALL_SIDE or task_of(source) == "segmentation":
        return False
    return probe(source).same_size == (image_size, image_size)


class DeviceDataset(SeededDataset):
    """Small images of side `image_size`, held on a device, with the batches of an `ImageDataset`.

    A DataLoader must neither pin its batches nor make them in workers, which would each hold the data.
    Pickling includes the pixels. `cutout`: side of a square of zeros in each training image; 0 for none.
    """

    def __init__(
        self,
        source: Source,
        *,
        image_size: int,
        channels: int,
        train: bool,
        device: torch.device | str,
        skip_bad: bool = False,
        crop: TrainingCrop = TrainingCrop(),  # noqa: B008 - frozen
        cutout: int = 0,
        limit_bytes: int = HELD_BYTES,
    ) -> None:
        if not can_hold(source, image_size=image_size, channels=channels, limit_bytes=limit_bytes):
            raise InputError(
                f"{len(source)} images of {image_size} x {image_size} x {channels} cannot be held on "
                f"{device}: all must have this size, at most {SMALL_SIDE}, and {limit_bytes} bytes in all"
            )
        self.source, self.image_size, self.channels = source, image_size, channels
        self.train = train
        self.crop = crop
        self.alternates = train and crop.flip == "alternate"
        self.cutout = cutout
        self.device = torch.device(device)
        images = ImageDataset(
            source,
            image_size=image_size,
            channels=channels,
            train=train,
            skip_bad=skip_bad,
            keep=False,
        )
        self._decoded = images.decoded(self.device)
        self._labels = source.labels.to(self.device)

    def __len__(self) -> int:
        return len(self.source)

    def describe(self, index: int) -> str:
        return self.source.describe(index)

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[tuple[Tensor, Tensor], Sequence[int]]:
        """One batch on the device: ((images (N, C, S, S), channels_last in memory, targets (N,) int64), bad
        indices).

        Indices and seeds (N,) int64 are on the CPU or the device; if the source has bad images, indices on
        the device make this wait.
        """
        used = indices
        bad = list[int]()
        if self._decoded.used is not None:
            indices = indices.cpu()
            used = self._decoded.used[indices]
            bad = indices[used != indices].tolist()
            used = used[used >= 0]
        used = self._on_device(used)
        x_NCHW = self._decoded.x_NHWC[used].permute(0, 3, 1, 2)
        if self.train:
            x_NCHW = batch_crop_flip(
                x_NCHW,
                self._on_device(seeds),
                padding=self.crop.padding_of(self.image_size),
                flip=self.crop.flip,
                cutout=self.cutout,
            )
        return (x_NCHW, self._labels[used]), bad

    def _on_device(self, numbers: Tensor) -> Tensor:
        if self.device.type == "cuda" and not numbers.is_cuda:
            numbers = numbers.pin_memory()  # copies from other host memory would wait
        return numbers.to(self.device, non_blocking=True)


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
