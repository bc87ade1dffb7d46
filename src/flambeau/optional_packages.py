"""Optional packages: imported when they are used, or named in an error with the command to install them."""

import importlib
from types import ModuleType

from flambeau.errors import InputError

_EXTRAS = {
    "pyarrow": "hf",
    "datasets": "hf",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
    "matplotlib": "plot",
    "pynvml": "gpu",
}
_FORMATS = "formats"  # the extra of all others
_INSTALLED_AS = {"pynvml": "nvidia-ml-py"}


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
