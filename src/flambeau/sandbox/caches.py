"""Folders of files that are downloaded, compiled or computed once, and made again if they are missing."""

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
    """The cache folders by environment variables or their defaults; none that contains the working folder."""
    names = {"tmp": tempfile.gettempdir(), "user": _user_name()}
    folders = []
    for variable, default in _FOLDERS:
        value = os.environ.get(variable) or default.format(**names)
        folder = Path(value).expanduser().absolute()
        if value and not Path.cwd().is_relative_to(folder):
            folders.append(folder)
    return list(dict.fromkeys(folders))


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        return str(os.getuid())
