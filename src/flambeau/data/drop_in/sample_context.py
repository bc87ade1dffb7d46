"""What transforms need to know of the sample being made: its random numbers, and its memory in the batch."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flambeau.data.drop_in.batch_memory import BatchMemory
from flambeau.images.decode import Stored
from flambeau.recipes.data.sample_order import mix

FindStored = Callable[[Any], Stored | None]
"""Returns the image of a path, if it is stored elsewhere."""


class Sample:
    """The sample that is being made in this thread.

    Args:
        number: its position in the batch; None if it stands for all samples of the batch, one image each.
        raw: keep 8-bit levels, to be normalized on the device.
    """

    def __init__(
        self,
        seed: int,
        number: int | None = 0,
        memory: BatchMemory | None = None,
        *,
        raw: bool = False,
        is_seeded: bool = False,
        stored: FindStored | None = None,
    ) -> None:
        self.seed, self.number, self.memory, self.raw = seed, number, memory, raw
        self.stored = stored
        self._start = torch.initial_seed() if is_seeded else None
        self._views = 0
        self._view_at: dict[int, int] = {}

    @property
    def is_reseeded(self) -> bool:
        """Whether the user's code has seeded torch's generator, and so expects certain draws."""
        return self._start is not None and torch.initial_seed() != self._start

    def next_view(self) -> tuple[int, int]:
        """The number of the image within the sample, and its seed.

        If the user's code has reset torch's generator to an earlier state, the seed repeats, too: that is
        how people transform an image and its mask alike.
        """
        view, self._views = self._views, self._views + 1
        drawn_as = view
        if self._start is not None:
            drawn_as = self._view_at.setdefault(int(torch.randint(2**62, (), device="cpu")), view)
        return view, mix(self.seed + drawn_as)

    def slot(self, view: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for an image (C, H, W)."""
        number, view = (view, 0) if self.number is None else (self.number, view)
        if self.memory is None or number >= self.memory.count:
            return torch.empty(shape, dtype=dtype, device="cpu")
        return self.memory.slot(number, view, shape, dtype)


_of_thread = threading.local()


def current_sample() -> Sample | None:
    """The sample that this thread makes; None outside of a FastLoader."""
    return getattr(_of_thread, "sample", None)


@contextmanager
def making(sample: Sample) -> Iterator[None]:
    """Whatever is read and transformed in this thread belongs to this sample."""
    before = current_sample()  # of a loader that reads this one's samples
    _of_thread.sample = sample
    try:
        yield
    finally:
        _of_thread.sample = before
