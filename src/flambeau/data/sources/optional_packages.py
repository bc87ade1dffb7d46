"""Packages that only some formats need."""

import importlib
from types import ModuleType

from flambeau.errors import InputError

_OF_HF = ("pyarrow", "datasets")


def extra(module: str, *, what: str) -> ModuleType:
    """A package of the extra `formats` or `hf`.

    Args:
        module: its name, to import and to install.
        what: what needs it, for the message.

    Raises:
        InputError: it is not installed; the message holds the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        group = "hf" if package in _OF_HF else "formats"
        raise InputError(
            f"{what} needs the package {package}\nInstall it: pip install 'flambeau[{group}]'"
        ) from error
