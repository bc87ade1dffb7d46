"""What a sample's transforms know of it: its random numbers, and where in the batch its images go."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.images.decode import Stored
from flambeau.recipes.data.sample_order import mix

_Key = tuple[int, torch.Size, torch.dtype]  # view, shape and dtype of an image


class BatchMemory:
    """The images of a batch in one piece of memory, which makes stacking them free.

    Args:
        count: samples of the batch.
        channels_last: the memory format of floating-point images.
        pinned: in page-locked memory.

    Attributes:
        batches: what there is so far, (N, C, H, W).
        tables: (C, 256) of those whose levels are still to be looked up.
    """

    def __init__(self, count: int, *, channels_last: bool = False, pinned: bool = False) -> None:
        self._count, self._channels_last, self._pinned = count, channels_last, pinned
        self._lock = threading.Lock()
        self.batches: dict[_Key, Tensor] = {}
        self.tables: dict[_Key, NDArray[np.float32]] = {}

    def place(self, number: int, view: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Where image `view` of sample `number` goes: (C, H, W), in the memory format of the batch."""
        key = view, shape, dtype
        with self._lock:
            batch = self.batches.get(key)
            if batch is None:
                batch = self.batches[key] = self._new(shape, dtype)
        return batch[number]

    def _new(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        channels, height, width = shape
        whole = (self._count, channels, height, width)
        if not self._channels_last:
            return torch.empty(whole, dtype=dtype, pin_memory=self._pinned)
        whole = (self._count, height, width, channels)
        return torch.empty(whole, dtype=dtype, pin_memory=self._pinned).permute(0, 3, 1, 2)


class Sample:
    """The sample that is being made in this thread.

    Args:
        seed: of its random numbers.
        number: its place in the batch.
        memory: of the batch; None where each image has its own.
        raw: levels are kept, to be normalized on the device.
        stored: gives the image of a path, where it has it in another place.
    """

    def __init__(
        self,
        seed: int,
        number: int = 0,
        memory: BatchMemory | None = None,
        *,
        raw: bool = False,
        stored: Callable[[Any], Stored | None] | None = None,
    ) -> None:
        self.seed, self.number, self.memory, self.raw = seed, number, memory, raw
        self.stored = stored
        self._views = 0

    def next_view(self) -> tuple[int, int]:
        """The number of the image among those of the sample, and its own seed."""
        view, self._views = self._views, self._views + 1
        return view, mix(self.seed + view)

    def place(self, view: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for an image (C, H, W)."""
        if self.memory is None:
            return torch.empty(shape, dtype=dtype)
        return self.memory.place(self.number, view, shape, dtype)


_of_thread = threading.local()


def current_sample() -> Sample | None:
    """The sample that this thread makes; None outside of our loader."""
    return getattr(_of_thread, "sample", None)


@contextmanager
def making(sample: Sample) -> Iterator[None]:
    """What is read and transformed in this thread belongs to this sample."""
    _of_thread.sample = sample
    try:
        yield
    finally:
        _of_thread.sample = None
