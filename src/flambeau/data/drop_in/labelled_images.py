"""Images of a path or an address, and their targets, as a map-style data set for a loop of one's own."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from flambeau.data.sources.block_order import block_sampler, default_window
from flambeau.data.sources.source import (
    Source,
    fetch_ahead,
    fetches_ahead,
    image_blocks,
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
    """The images of a source, each through a transform, with its target.

    Of torchvision's transforms `fast` runs those that it knows.

    Args:
        transform: from an RGB image of PIL, upright, to what a sample holds.
        window: see `sampler`; None: by the place and the number of the images.

    Attributes:
        classes: names of the classes, labels or columns of numbers.
        targets: of each image: (N,) int64, of several labels or numbers (N, K) float32.
        window: see `sampler`; 0 for a permutation.
        fetches_ahead: whether `fetch_ahead` has an effect.
        in_blocks: whether neighbours are parts of one file, and so are read together best.

    Raises:
        InputError: the images have masks, or other pixels than color and grey of 8 bits.
    """

    def __init__(
        self, source: Source, transform: Callable[[Any], Any], *, window: int | None = None
    ) -> None:
        self._source, self._transform = source, transform
        if task_of(source) == "segmentation":
            raise InputError(
                f"{source.describe(0)} has a mask, and a transform of images alone would not change it\n"
                "Train on masks with `flambeau train`, or write a Dataset that reads both"
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
        """Told which images come next, in order; False if these are enough for now."""
        return fetch_ahead(self._source, indices)

    def describe(self, index: int) -> str:
        """The name of an image in messages."""
        return self._source.describe(index)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        """An image and its target.

        Raises:
            InputError: the image cannot be read.
            IndexError: there is no such image.
        """
        # Torchvision, two seconds of a start, is not loaded where nothing is read this way.
        from flambeau.data.drop_in.interception import taking_over
        from flambeau.data.drop_in.lazy_image import open_upright

        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no image {index}: there are {len(self)}")
        index %= len(self)
        target = self.targets[index]
        try:
            image = open_upright(self._read(index))
            with taking_over():
                sample = self._transform(image)
        except DecodeError as error:
            raise InputError(f"{self.describe(index)}: {error}\nRepair or remove it") from error
        return sample, target.clone() if target.dim() else int(target)

    def _read(self, index: int) -> Stored:
        try:
            return self._source.read(index)
        except OSError as error:
            remedy = disk_remedy(error.errno)
            advice = f"\n{remedy} and run it again" if remedy else "\nRepair or remove it"
            raise InputError(f"{self.describe(index)}: {why_unreadable(error)}{advice}") from error
