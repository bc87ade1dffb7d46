"""Batches of augmented images from a source."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.datasets.image_statistics import probe
from flambeau.data.loading.seeded_dataset import SeededDataset
from flambeau.data.loading.workers.progress import reading
from flambeau.data.sources.source import (
    Source,
    fetch_ahead,
    fetches_ahead,
    image_blocks,
    mask_of,
    pixel_kind,
)
from flambeau.data.sources.targets import task_of
from flambeau.data.transforms.auto_augment import Augmentation
from flambeau.data.transforms.crops import TrainingCrop, eval_image, train_image
from flambeau.data.transforms.mask_crops import Mask, eval_mask, train_mask
from flambeau.errors import DecodeError, InputError, disk_remedy
from flambeau.images.decode import Picture, Stored
from flambeau.images.stand_ins import why_unreadable
from flambeau.images.thread_pool import DecodePool
from flambeau.recipes.data.batch_crop_flip import batch_crop_flip

_DECODED_AT_ONCE = 4096  # images in progress, so that the host never has all of them twice


NUMPY_TYPES = {torch.uint8: np.uint8, torch.float32: np.float32}  # of pixels


class NothingReadable(ValueError):
    """No image of the data set is readable."""


class DecodedImages:
    """Small images decoded once and kept, on the host or on the device.

    N: images, S: side in pixels, C: channels.

    Args:
        read: from positions (N,) to these, with -1 for images that cannot be decoded, and the others' pixels.
        shape: (S, S, C).
        replace: replace a bad image by the next readable one; else leave it out.

    Attributes:
        used: (length,) int64 on the CPU, the image used for each, -1 for none; None if all are readable.
        x_NHWC: (length, S, S, C) of `dtype` on the device; zeros for bad images.
    """

    def __init__(
        self,
        read: Callable[[Tensor], tuple[Tensor, Tensor]],
        length: int,
        shape: tuple[int, int, int],
        *,
        device: torch.device,
        replace: bool,
        dtype: torch.dtype = torch.uint8,
    ) -> None:
        self.used: Tensor | None = None
        if device.type == "cpu":  # NumPy asks Linux for huge pages, torch does not
            self.x_NHWC = torch.from_numpy(np.zeros((length, *shape), NUMPY_TYPES[dtype]))
        else:
            self.x_NHWC = torch.zeros(length, *shape, dtype=dtype, device=device)
        good = torch.ones(length, dtype=torch.bool)
        for indices in torch.arange(length).split(_DECODED_AT_ONCE):
            used, x_NHWC = read(indices)
            good[indices] = used >= 0
            self.x_NHWC[indices[used >= 0].to(device)] = x_NHWC.to(device)
        if good.all():
            return
        positions = torch.arange(length)
        self.used = torch.where(good, positions, -1)
        if replace:
            if not good.any():
                raise NothingReadable
            readable = positions[good]
            next_one = torch.searchsorted(readable, positions) % len(readable)
            self.used = readable[next_one]


# In images up to this side a random resized crop would leave too little (CIFAR 32, Tiny ImageNet 64).
SMALL_SIDE = 64
CACHE_BYTES = 256 << 20  # decoded small images kept in memory: 87,000 of 32 x 32 x 3


def pixel_type(source: Source) -> torch.dtype:
    """The dtype of a source's decoded images: uint8 or float32."""
    return torch.uint8 if pixel_kind(source) == "uint8" else torch.float32


class ImageDataset(SeededDataset):
    """Images of a source, all of one size, augmented for training or cropped for evaluation.

    If image_size is at most 64 and a probe finds only images of that size, training shifts and mirrors them,
    and up to 256 MiB are decoded once, here, and shared with forked workers. Others are decoded for each
    batch, and training takes random resized crops.

    Args:
        skip_bad: replace an unreadable image in training by the next readable one, with its own seed, and
            leave it out in evaluation.
        augmentation: of training images, after crop and flip; floating-point pixels are only moved.
        keep: keep decoded small images; False if each is read only once.
        threads: per batch; None for this process's CPUs, or one in a DataLoader's worker. Pixels do not
            depend on it.
    """

    def __init__(
        self,
        source: Source,
        *,
        image_size: int,
        channels: int,
        train: bool,
        skip_bad: bool = False,
        crop: TrainingCrop = TrainingCrop(),  # noqa: B008 - frozen
        augmentation: Augmentation = Augmentation(),  # noqa: B008 - frozen
        keep: bool = True,
        threads: int | None = None,
    ) -> None:
        self.source, self.image_size, self.channels = source, image_size, channels
        self.train, self.skip_bad = train, skip_bad
        self.crop, self.augmentation = crop, augmentation
        self.alternates = train and crop.flip == "alternate"
        self.dtype = pixel_type(source)
        is_float = pixel_kind(source) not in ("uint8", "uint16")
        if is_float and (augmentation.jitter or (augmentation and not augmentation.moves_only)):
            raise InputError(
                f"{source.describe(0)} has floating-point pixels, which --color-jitter does not change\n"
                "Leave it out, or return 8-bit pixels"
            )
        self._pool = DecodePool(threads)
        self.has_masks = task_of(source) == "segmentation"
        may_be_small = image_size <= SMALL_SIDE and (train or keep) and not self.has_masks
        same_size = probe(source).same_size if may_be_small else None
        self.small = same_size == (image_size, image_size)
        self._kept: DecodedImages | None = None
        size = len(source) * image_size**2 * channels * self.dtype.itemsize
        if keep and self.small and size <= CACHE_BYTES:
            self._kept = self.decoded(torch.device("cpu"))
            # A new pool: its threads start when they are needed, and none should exist at a fork.
            self._pool = DecodePool(threads)
        self.fetches_ahead = self._kept is None and fetches_ahead(source)
        self.in_blocks = image_blocks(source) is not None

    def __len__(self) -> int:
        return len(self.source)

    def describe(self, index: int) -> str:
        return self.source.describe(index)

    def fetch_ahead(self, indices: NDArray[np.int64]) -> bool:
        return fetch_ahead(self.source, indices)

    def batch(self, indices: Tensor, seeds: Tensor) -> tuple[tuple[Tensor, Tensor], Sequence[int]]:
        """Make one batch.

        Returns:
            ((images, targets), bad): images (N, C, S, S) of `dtype`, channels_last; targets (N,) int64, of
            other tasks rows of float32 or masks (N, S, S) uint8; and the unreadable indices, replaced in
            training, missing in evaluation.
        """
        masks: Tensor | None = None
        if self._kept is None:
            tries = (
                len(self) if self.train else 1
            )  # in training the next readable image replaces a bad one
            used, x_NHWC, masks = self._read(indices.tolist(), seeds.tolist(), tries=tries)
        else:
            used = indices if self._kept.used is None else self._kept.used[indices]
            x_NHWC = self._kept.x_NHWC[used[used >= 0]]
        kept = used >= 0
        x_NCHW = x_NHWC.permute(0, 3, 1, 2)
        if self.train and self.small:
            padding = self.crop.padding_of(self.image_size)
            x_NCHW = batch_crop_flip(x_NCHW, seeds, padding=padding, flip=self.crop.flip)
            self._augment(x_NCHW.permute(0, 2, 3, 1), seeds.tolist())
        targets = self.source.labels[used[kept]] if masks is None else masks
        return (x_NCHW, targets), indices[used != indices].tolist()

    def decoded(self, device: torch.device) -> DecodedImages:
        """All images, which must be small, decoded once and kept on a device."""

        def read(indices: Tensor) -> tuple[Tensor, Tensor]:
            return self._read(indices.tolist(), [0] * len(indices), tries=1)[:2]

        shape = self.image_size, self.image_size, self.channels
        try:
            return DecodedImages(
                read, len(self), shape, device=device, replace=self.train, dtype=self.dtype
            )
        except NothingReadable as error:
            raise self._all_bad() from error

    def _augment(self, x_NHWC: Tensor, seeds: Sequence[int]) -> None:
        """Augments small images in place, after all of them have been cropped."""
        if self.augmentation:
            pixels = x_NHWC.numpy()

            def work(k: int) -> None:
                pixels[k] = self.augmentation(pixels[k], seeds[k])

            self._pool.each(len(pixels), work)

    def _all_bad(self) -> InputError:
        return InputError(f"{self.describe(0)} and all {len(self) - 1} other images are bad")

    def _read(
        self, indices: Sequence[int], seeds: Sequence[int], *, tries: int
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Position of the image used for each index, -1 if left out; the pixels of the used ones; masks."""
        side = self.image_size
        shape = len(indices), side, side, self.channels
        # NumPy asks Linux for huge pages, torch does not: 8 us per image against 39 for fresh memory.
        x_NHWC = torch.from_numpy(np.empty(shape, NUMPY_TYPES[self.dtype]))
        masks = np.empty((len(indices), side, side), np.uint8) if self.has_masks else None
        used = [-1] * len(indices)

        def work(k: int) -> None:
            mask = None if masks is None else masks[k]
            used[k] = self._write_first_readable(indices[k], seeds[k], x_NHWC[k], mask, tries)

        self._pool.each(len(indices), work)
        positions = torch.tensor(used, dtype=torch.int64)
        kept = None if masks is None else torch.from_numpy(masks)
        if -1 in used:
            x_NHWC = x_NHWC[positions >= 0]
            kept = None if kept is None else kept[positions >= 0]
        return positions, x_NHWC, kept

    def _write_first_readable(
        self, index: int, seed: int, out: Tensor, mask: Mask | None, tries: int
    ) -> int:
        """Write an image, or the first readable one after it, and return its position; -1 for none."""
        for step in range(tries):
            position = (index + step) % len(self)
            try:
                with reading(position):
                    self._write(position, seed, out, mask)
            except DecodeError as error:
                if not self.skip_bad:
                    raise InputError(
                        f"{self.describe(position)}: {error}\n"
                        "Repair or remove it, or allow N bad images with --skip-bad-images N"
                    ) from error
            else:
                return position
        if tries == len(self) and self.train:
            raise self._all_bad()
        return -1

    def _write(self, index: int, seed: int, out: Tensor, mask: Mask | None) -> None:
        try:
            data = self.source.read(index)
        except OSError as error:
            if (remedy := disk_remedy(error.errno)) is not None:
                # Not of this image, which is not to be left out or replaced by another one.
                why = f"{self.describe(index)}: {why_unreadable(error)}"
                raise InputError(f"{why}; {remedy} and run the command again") from error
            raise DecodeError(why_unreadable(error)) from error
        if mask is not None:
            self._write_mask(index, data, seed, mask)
        if self.train and not self.small:
            train_image(
                data, seed, self.image_size, channels=self.channels, crop=self.crop, out=out
            )
            if self.augmentation:
                out.numpy()[:] = self.augmentation(out.numpy(), seed)
        else:
            eval_image(
                data,
                self.image_size,
                channels=self.channels,
                interpolation=self.crop.interpolation,
                resize=self.crop.eval_resize,
                out=out,
            )

    def _write_mask(self, index: int, image: Stored, seed: int, out: Mask) -> None:
        mask = mask_of(self.source, index)
        assert mask is not None
        picture = Picture(image)
        if mask.shape != (picture.height, picture.width):  # changed since it was opened
            raise DecodeError(
                f"its mask has {mask.shape[1]} x {mask.shape[0]} pixels, and the image "
                f"{picture.width} x {picture.height}"
            )
        if self.train:
            train_mask(mask, seed, out, crop=self.crop)
        else:
            eval_mask(mask, out)
