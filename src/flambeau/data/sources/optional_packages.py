"""Packages that only some formats need."""

import importlib
from types import ModuleType

from flambeau.errors import InputError


def extra(module: str, *, what: str) -> ModuleType:
    """A package of the extra `formats`.

    Args:
        module: its name, to import and to install.
        what: what needs it, for the message.

    Raises:
        InputError: it is not installed; the message holds the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise InputError(
            f"{what} needs the package {module}\nInstall it: pip install 'flambeau[formats]'"
        ) from error
