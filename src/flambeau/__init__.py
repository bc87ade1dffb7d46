"""flambeau: train image classifiers, keep your own loop exact, take any recipe away as one file.

The names of `__all__` and `flambeau.recipes.*` are public; all other modules are private and may change.
Importing flambeau imports neither torch nor the modules behind these names.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flambeau.version import __version__ as __version__

if TYPE_CHECKING:
    from flambeau.data.fast import fast
    from flambeau.data.wrap import wrap
    from flambeau.errors import DamagedData, InputError, WorkerLost
    from flambeau.experiments.api import sweep
    from flambeau.exports.api import export
    from flambeau.parallel.preemption import Preempted
    from flambeau.provenance import UntrustedCode
    from flambeau.run.folder.checkpointer import SaveFailed
    from flambeau.run.loop.nan_guard import NotFinite
    from flambeau.run.options.run_options import RunOptions
    from flambeau.run.run import Run
    from flambeau.trainer.api import evaluate, load, train

__all__ = [
    "DamagedData",
    "InputError",
    "NotFinite",
    "Preempted",
    "Run",
    "RunOptions",
    "SaveFailed",
    "UntrustedCode",
    "WorkerLost",
    "evaluate",
    "export",
    "fast",
    "load",
    "sweep",
    "train",
    "wrap",
]

_FILES = {
    "DamagedData": "flambeau.errors",
    "InputError": "flambeau.errors",
    "NotFinite": "flambeau.run.loop.nan_guard",
    "Preempted": "flambeau.parallel.preemption",
    "Run": "flambeau.run.run",
    "RunOptions": "flambeau.run.options.run_options",
    "SaveFailed": "flambeau.run.folder.checkpointer",
    "UntrustedCode": "flambeau.provenance",
    "WorkerLost": "flambeau.errors",
    "evaluate": "flambeau.trainer.api",
    "export": "flambeau.exports.api",
    "fast": "flambeau.data.fast",
    "load": "flambeau.trainer.api",
    "sweep": "flambeau.experiments.api",
    "train": "flambeau.trainer.api",
    "wrap": "flambeau.data.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'flambeau' has no attribute {name!r}")
    return getattr(importlib.import_module(_FILES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
