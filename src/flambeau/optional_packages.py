"""Optional packages, imported when they are used or named in an error with the command to install them; and
large ones, imported without Python's search for cycles."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

from flambeau.errors import InputError

_EXTRAS = {
    "pyarrow": "hf",
    "datasets": "hf",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
    "fsspec": "remote",
    "aiohttp": "remote",
    "s3fs": "remote",
    "gcsfs": "gs",
    "adlfs": "az",
    "matplotlib": "plot",
    "optuna": "sweep",
    "pynvml": "gpu",
    "segmentation_models_pytorch": "smp",
}
_FORMATS = "formats"  # the extra of all others
_INSTALLED_AS = {
    "pynvml": "nvidia-ml-py",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
}


def extra(module: str, *, what: str) -> ModuleType:
    """Import an optional package, or name in an InputError the command to install it; `what` needs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name in (package, module)
        raise InputError(
            f"{what} needs the package {_INSTALLED_AS.get(package, package)}"
            f"{'' if is_missing else f', which is there and cannot be imported: {error}'}\n"
            f"Install it: pip install 'flambeau[{_EXTRAS.get(package, _FORMATS)}]'"
        ) from error


@contextlib.contextmanager
def large_import() -> Iterator[None]:
    """Meanwhile Python does not look for cycles, which takes a fifth of the time of importing torch or timm.

    Later searches skip the objects of such an import, too, in a process that has called `gc.freeze`.
    """
    num_modules = len(sys.modules)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Only a process of a command has frozen anything: elsewhere the user may decide so. Python counts
        # what is frozen by walking through it, 0.07 s for torch and timm: without an import nobody asks.
        if len(sys.modules) > num_modules and gc.get_freeze_count():
            gc.freeze()
        if was_enabled:
            gc.enable()
