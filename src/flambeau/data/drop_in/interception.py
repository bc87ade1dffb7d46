"""While `fast` makes a sample, PIL's and torchvision's functions for reading and transforming call ours.

In other threads and at other times they are unchanged: a thread-local variable holds the sample being made.
"""

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import PIL.Image
import torch
from PIL import Image

from flambeau.data.drop_in.lazy_image import LazyImage, open_lazily
from flambeau.data.drop_in.sample_context import (
    OWN,
    READING,
    SEEDED,
    Sample,
    current_sample,
    making,
)
from flambeau.data.drop_in.transform_kinds import WEIGHTS_TRANSFORM, are_same, settings_of
from flambeau.data.drop_in.transform_plan import Plan, can_take, plan_of
from flambeau.errors import DecodeError

Plans = weakref.WeakKeyDictionary[Any, tuple[list[Any], Plan | None]]
"""The settings of a Compose, and its plan with these; None if nothing of it can be taken over."""

_plans: Plans = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@functools.cache
def install() -> None:
    """Replace the functions, once per process."""
    from torchvision.datasets import folder
    from torchvision.transforms import Compose, v2

    opener = PIL.Image.open
    loader = folder.pil_loader

    @functools.wraps(opener)
    def open_image(fp: Any, mode: Any = "r", formats: Any = None) -> Image.Image:
        sample = current_sample()
        if sample is None or mode != "r":
            return opener(fp, mode, formats)
        stored = None if sample.stored is None else sample.stored(fp)
        return open_lazily(opener, fp, stored, formats)

    @functools.wraps(loader)
    def load_image(path: Any) -> Image.Image:
        """An image that is stored elsewhere: its file is not even opened."""
        sample = current_sample()
        stored = None if sample is None or sample.stored is None else sample.stored(path)
        if stored is None:
            image: Image.Image = loader(path)
            return image
        return open_lazily(opener, path, stored).convert("RGB")

    PIL.Image.open = open_image  # type: ignore[assignment]
    folder.pil_loader = load_image
    _intercept(Compose, "__call__")
    _intercept(v2.Compose, "forward")
    _intercept(WEIGHTS_TRANSFORM, "forward")


@contextlib.contextmanager
def taking_over() -> Iterator[None]:
    """In here `fast` runs what it knows of the transforms; they draw from torch's global generator."""
    if current_sample() is not None:  # of a FastLoader
        yield
        return
    install()
    with making(Sample(int(torch.randint(2**62, (), device="cpu")))):
        yield


def plan_for(compose: Any, kept: Plans | None = None) -> Plan | None:
    """The plan of a Compose as it is now; None if nothing can be taken over.

    `kept` plans stay, whatever becomes of the Compose.
    """
    if kept is not None:
        with _lock:
            if compose not in kept:
                kept[compose] = [], plan_of(compose, is_copied=True)
            return kept[compose][1]
    settings = settings_of(compose)
    with _lock:
        if compose not in _plans or not are_same(_plans[compose][0], settings):
            _plans[compose] = settings, plan_of(compose)
        return _plans[compose][1]


def _intercept(kind: type, method: str) -> None:
    original = getattr(kind, method)

    @functools.wraps(original)
    def call(self: Any, *inputs: Any) -> Any:
        sample = current_sample()
        if sample is None:
            return original(self, *inputs)
        if not can_take(inputs):
            sample.counts[OWN] += 1
            return original(self, *inputs)
        plan = plan_for(self, sample.plans)
        if plan is None or not plan.takes(inputs):
            sample.counts[OWN] += 1
            return original(self, *inputs)
        if sample.is_reseeded or (plan.draws_python and sample.is_python_reseeded):
            sample.counts.update([OWN, SEEDED])
            return original(self, *inputs)
        is_read = isinstance(inputs[0], LazyImage) and not inputs[0].is_left_to_pil
        try:
            result = plan.run(inputs, sample)
        except DecodeError:  # PIL may read it, or raise its own error
            sample.counts[OWN] += 1
            return original(self, *inputs)
        sample.counts.update([READING, *plan.taken] if is_read else plan.taken)
        return result

    setattr(kind, method, call)
