"""Images of a path or an address, and their targets, as a map-style data set for a loop of one's own."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from flambeau.data.sources.block_shuffle import block_sampler, default_window
from flambeau.data.sources.source import (
    Source,
    fetch_ahead,
    fetches_ahead,
    image_blocks,
    mask_of,
    pixel_kind,
    stacked_channels,
)
from flambeau.data.sources.targets import task_of
from flambeau.errors import DecodeError, InputError, disk_remedy
from flambeau.images.decode import Stored
from flambeau.images.stand_ins import why_unreadable
from flambeau.recipes.data.samplers import BlockSampler

Part = Literal["train", "val"]
PARTS: tuple[str, ...] = get_args(Part)


class LabelledImages(Dataset[tuple[Any, Any]]):
    """The images of a source through a transform, with their targets.

    Of torchvision's transforms `fast` runs those that it knows.

    Args:
        transform: from an upright RGB image of PIL to what a sample holds. With masks it also gets
            torchvision's `tv_tensors.Mask` (H, W) uint8 of positions in `classes`, 255 for none, and returns
            the sample.
        window: see `sampler`; None: by the place and the number of the images.

    Attributes:
        classes: of classes, labels or columns of numbers.
        targets: (N,) int64; of several labels or numbers (N, K) float32; of masks each class's share of the
            pixels.
        window: see `sampler`; 0 for a permutation.
    """

    def __init__(
        self, source: Source, transform: Callable[[Any], Any], *, window: int | None = None
    ) -> None:
        self._source, self._transform = source, transform
        self._has_masks = task_of(source) == "segmentation"
        if self._has_masks and not _takes_two(transform):
            raise InputError(
                f"{source.describe(0)} has a mask, and the transform takes an image alone\n"
                "Give one that takes both, transform(image, mask), and returns both, as "
                "torchvision.transforms.v2.Compose does"
            )
        if pixel_kind(source) != "uint8" or stacked_channels(source) is not None:
            raise InputError(
                f"{source.describe(0)} has other pixels than color or grey of 8 bits\n"
                "Write a Dataset that reads them, and give that"
            )
        self.window = (default_window(source) or 0) if window is None else window
        self.in_blocks = image_blocks(source) is not None
        if self.window and not self.in_blocks:
            raise InputError(
                f"shuffle_window = {window} is for images in .tar, .zip, .rec, .tfrecord, .parquet and "
                f".arrow files, here or in a store, and {source.describe(0)} is none of them: leave it out"
            )
        self.classes = source.classes
        self.targets: Tensor = source.labels
        self.fetches_ahead = fetches_ahead(source)

    def sampler(self, seed: int) -> BlockSampler | None:
        """The order in two levels, by blocks and a window; None: a permutation of all images."""
        if not self.window:
            return None
        return block_sampler(self._source, window=self.window, seed=seed)

    def fetch_ahead(self, indices: NDArray[np.int64]) -> bool:
        """Told the next images, in order; False if these are enough."""
        return fetch_ahead(self._source, indices)

    def describe(self, index: int) -> str:
        return self._source.describe(index)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """An image and its target; with masks what the transform returns. InputError: it cannot be read."""
        # Torchvision, two seconds of a start, is not loaded where nothing is read this way.
        from flambeau.data.drop_in.interception import taking_over
        from flambeau.data.drop_in.lazy_image import open_upright

        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no image {index}: there are {len(self)}")
        index %= len(self)
        try:
            image = open_upright(self._read(index))
            inputs = (image, self._mask(index, image.size)) if self._has_masks else (image,)
            with taking_over():
                sample = self._transform(*inputs)
        except DecodeError as error:
            raise InputError(f"{self.describe(index)}: {error}\nRepair or remove it") from error
        if self._has_masks:
            return self._image_and_mask(index, sample)
        target = self.targets[index]
        return sample, target.clone() if target.dim() else int(target)

    def _mask(self, index: int, size: tuple[int, int]) -> Any:
        from torchvision import tv_tensors

        mask = mask_of(self._source, index)
        assert mask is not None
        if mask.shape != size[::-1]:
            raise DecodeError(
                f"its mask has {mask.shape[1]} x {mask.shape[0]} pixels, and the image "
                f"{size[0]} x {size[1]}"
            )
        return tv_tensors.Mask(torch.from_numpy(mask.copy()))

    def _image_and_mask(self, index: int, sample: Any) -> tuple[Any, Any]:
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise InputError(
                f"{self.describe(index)}: the transform of an image and its mask returned "
                f"{type(sample).__name__}, and not these two\nReturn (image, mask)"
            )
        image, mask = sample
        # A plain tensor, which all of torch takes, and which is collated with other plain ones.
        return image, mask.as_subclass(Tensor) if isinstance(mask, Tensor) else mask

    def _read(self, index: int) -> Stored:
        try:
            return self._source.read(index)
        except OSError as error:
            remedy = disk_remedy(error.errno)
            advice = f"\n{remedy} and run it again" if remedy else "\nRepair or remove it"
            raise InputError(f"{self.describe(index)}: {why_unreadable(error)}{advice}") from error


def _takes_two(transform: Callable[..., Any]) -> bool:
    """Whether a function can be called with an image and its mask, as far as it says."""
    called = transform.forward if isinstance(transform, nn.Module) else transform
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):  # of a function in C
        return True
    try:
        signature.bind(None, None)
    except TypeError:
        return False
    return True
