"""flambeau: train image classifiers, keep your own loop exact, take any recipe away as one file.

`from flambeau import Run` and the other names of `__all__` are the same things as in their files; importing
flambeau alone imports neither them nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flambeau.version import __version__ as __version__

if TYPE_CHECKING:
    from flambeau.data.wrap import wrap
    from flambeau.train.api import evaluate, load, train
    from flambeau.train.run import Run

__all__ = ["Run", "evaluate", "load", "train", "wrap"]

_FILES = {
    "Run": "flambeau.train.run",
    "evaluate": "flambeau.train.api",
    "load": "flambeau.train.api",
    "wrap": "flambeau.data.wrap",
}


def __getattr__(name: str) -> Any:
    if name == "train":  # a folder too, which is callable
        return importlib.import_module("flambeau.train")
    if name not in _FILES:
        raise AttributeError(f"module 'flambeau' has no attribute {name!r}")
    return getattr(importlib.import_module(_FILES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
