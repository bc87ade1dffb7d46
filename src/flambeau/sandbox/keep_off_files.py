"""Keeps this process from the user's files: for commands that run a user's code and must leave nothing."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from flambeau.sandbox.caches import cache_folders
from flambeau.sandbox.overlay_view import enter_view, most_in_memory

_folders: dict[Path, int] = {}


def keep_off_files(outputs: Sequence[Path] = ()) -> str:
    """From now on this process and its children write only to caches and `outputs` (as of `outside`).

    Other writes go to memory and end with them. Call it before any thread is started. Returns why files are
    not protected; '' if they are.
    """
    if sys.platform != "linux":
        return "only Linux has mount namespaces"
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return "this process has threads already"
    for output in outputs:
        folder = output.absolute().parent
        if folder.is_dir():
            _folders[folder] = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    caches = [str(folder) for folder in cache_folders() if folder.is_dir()]
    try:
        enter_view([], real=caches, roots=[str(Path.cwd())], memory_bytes=most_in_memory())
    except OSError as error:
        return f"{error.filename or 'mount'}: {error.strerror or error}"
    return ""


def outside(file: Path) -> Path:
    """Where the command writes an output that the view may cover; other paths unchanged."""
    folder = _folders.get(file.absolute().parent)
    return file if folder is None else Path(f"/proc/self/fd/{folder}") / file.name
