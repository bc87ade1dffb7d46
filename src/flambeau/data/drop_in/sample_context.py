"""What transforms need to know of the sample being made: its random numbers, and its memory in the batch."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flambeau.data.drop_in.batch_memory import BatchMemory
from flambeau.images.decode import Stored
from flambeau.recipes.data.sample_order import mix

SAMPLES, READING = "samples", "reading"
OWN = "Compose"  # one that was called and ran as it is
SEEDED = "seeded"  # one that did so because the user's code had seeded a generator
_SEED_BITS = 0xFFFFFFFFFFFFFFFF  # of a sample's seed, as `seed_cpu` takes them

FindStored = Callable[[Any], Stored | None]
"""Returns the image of a path, if it is stored elsewhere."""


class Seeds(NamedTuple):
    """What a transform draws from, in place of the global generators of torch and of Python's `random`.

    They differ only where the user's code has reset one.
    """

    torch: int
    python: int

    def of_step(self, number: int) -> "Seeds":
        """The seeds of a step of a pipeline, or of a transform inside another."""
        return Seeds(mix(self.torch + number), mix(self.python + number))

    def __add__(self, number: Any) -> "Seeds":
        return Seeds(self.torch + number, self.python + number)


class Sample:
    """The sample that is being made in this thread.

    Args:
        number: its position in the batch; None if it stands for all, one image each.
        raw: keep 8-bit levels, to be normalized on the device.
        plans: of the epoch by Compose, if changes within it do not count.
        counts: gets the number of SAMPLES, of each READING and transform taken over, of OWN and of SEEDED.
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
        plans: Any = None,
        counts: Counter[str] | None = None,
    ) -> None:
        self.seed, self.number, self.memory, self.raw = seed, number, memory, raw
        self.stored = stored
        self.plans = plans
        self.counts = Counter[str]() if counts is None else counts
        self.counts[SAMPLES] += 1
        self._start = torch.initial_seed() if is_seeded else None
        self._views = 0
        self._view_at: dict[tuple[str, int], int] = {}

    @property
    def is_reseeded(self) -> bool:
        """Whether the user's code has seeded torch's generator."""
        return self._start is not None and torch.initial_seed() != self._start

    @property
    def is_python_reseeded(self) -> bool:
        """Whether the user's code has seeded Python's generator."""
        if self._start is None:
            return False
        words = random.getstate()[1][:-1]
        expected = random.Random(self.seed & _SEED_BITS)
        if words == expected.getstate()[1][:-1]:
            return False
        expected.random()
        return bool(words != expected.getstate()[1][:-1])

    def next_view(self, *, draws_python: bool = False) -> tuple[int, Seeds]:
        """The number of the image within the sample, and its seeds.

        If the user's code resets a generator, as people do to transform an image and its mask alike, its seed
        repeats, too.
        """
        view, self._views = self._views, self._views + 1
        drawn_as = Seeds(view, view)
        if self._start is not None:
            drawn = int(torch.randint(2**62, (), device="cpu"))
            of_torch = self._view_at.setdefault(("torch", drawn), view)
            of_python = of_torch
            if draws_python:
                of_python = self._view_at.setdefault(("python", random.getrandbits(62)), view)
            drawn_as = Seeds(of_torch, of_python)
        return view, (drawn_as + self.seed).of_step(0)

    def slot(
        self, view: int, shape: torch.Size, dtype: torch.dtype, *, channels_last: bool
    ) -> Tensor:
        """Memory for an image (C, H, W): in the batch's, or of its own with these strides."""
        number, view = (view, 0) if self.number is None else (self.number, view)
        if self.memory is None or number >= self.memory.count:
            if channels_last:
                stored = torch.empty((*shape[1:], shape[0]), dtype=dtype, device="cpu")
                return stored.permute(2, 0, 1)
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
