"""Folders of things that are downloaded, compiled or computed once, and made anew where they are missing."""

import getpass
import os
import tempfile
from pathlib import Path

_FOLDERS = (
    ("XDG_CACHE_HOME", "~/.cache"),
    ("TORCH_HOME", ""),
    ("HF_HOME", ""),
    ("TRITON_CACHE_DIR", "~/.triton"),
    ("CUDA_CACHE_PATH", "~/.nv"),
    ("TORCHINDUCTOR_CACHE_DIR", "{tmp}/torchinductor_{user}"),
)


def cache_folders() -> list[Path]:
    """By the environment's variables or their defaults; none that holds the working folder."""
    names = {"tmp": tempfile.gettempdir(), "user": _user_name()}
    found = []
    for variable, default in _FOLDERS:
        value = os.environ.get(variable) or default.format(**names)
        folder = Path(value).expanduser().absolute()
        if value and not Path.cwd().is_relative_to(folder):
            found.append(folder)
    return list(dict.fromkeys(found))


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as containers have them
        return str(os.getuid())
