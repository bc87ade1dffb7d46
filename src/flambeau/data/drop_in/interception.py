"""While `fast` makes a sample, PIL's and torchvision's functions for reading and transforming call ours.

In other threads and at other times they are unchanged: a thread-local variable holds the sample being made.
"""

import functools
import threading
import weakref
from typing import Any

import PIL.Image
from PIL import Image

from flambeau.data.drop_in.lazy_image import open_lazily
from flambeau.data.drop_in.sample_context import current_sample
from flambeau.data.drop_in.transform_kinds import WEIGHTS_TRANSFORM
from flambeau.data.drop_in.transform_plan import Plan, can_take, plan_of
from flambeau.errors import DecodeError

_plans: weakref.WeakKeyDictionary[Any, Plan | None] = weakref.WeakKeyDictionary()
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


def plan_for(compose: Any) -> Plan | None:
    """The plan of a Compose; None if nothing of it can be taken over."""
    with _lock:
        if compose not in _plans:
            _plans[compose] = plan_of(compose)
        return _plans[compose]


def forget_plans() -> None:
    """Transforms may have changed since, for example to larger images in the next epoch."""
    with _lock:
        _plans.clear()


def _intercept(kind: type, method: str) -> None:
    original = getattr(kind, method)

    @functools.wraps(original)
    def call(self: Any, *inputs: Any) -> Any:
        sample = current_sample()
        if sample is None or len(inputs) != 1 or not can_take(inputs[0]):
            return original(self, *inputs)
        plan = None if sample.is_reseeded else plan_for(self)
        if plan is None or (plan.draws_python and sample.is_python_reseeded):
            return original(self, *inputs)
        try:
            return plan.run(inputs[0], sample)
        except DecodeError:  # PIL may read it, or raise its own error
            return original(self, *inputs)

    setattr(kind, method, call)
