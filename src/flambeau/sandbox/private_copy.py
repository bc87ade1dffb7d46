"""Copies a working folder for a process that may write nowhere else."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

_CLONE = 0x4004_9409  # FICLONE of ioctl_ficlone(2): the copy shares its blocks until one is written
_SMALL_BYTES = 8 * 2**20
_MOST_BYTES = 2**30
_MOST_FILES = 50_000
"""Beyond these limits, which are chosen, a file becomes a link to the real one: readable and replaceable."""


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder for a process that cannot write to the source; unreadable files are left out."""
    left_bytes, left_files = _MOST_BYTES, _MOST_FILES
    for folder, folders, names in os.walk(source):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True, exist_ok=True)
        for name in [one for one in folders if _is_tool_folder(Path(folder) / one)]:
            folders.remove(name)
            (here / name).symlink_to(Path(folder) / name)
        for name in [*names, *(one for one in folders if (Path(folder) / one).is_symlink())]:
            file = Path(folder) / name
            left_files -= 1
            with suppress(OSError):
                if file.is_symlink():
                    (here / name).symlink_to(_link_target(file, source))
                elif not file.is_file():
                    continue
                elif _cloned(file, here / name):
                    shutil.copystat(file, here / name)
                elif left_files > 0 and file.stat().st_size <= min(_SMALL_BYTES, left_bytes):
                    left_bytes -= file.stat().st_size
                    shutil.copy2(file, here / name)
                else:
                    (here / name).symlink_to(file)


def _is_tool_folder(folder: Path) -> bool:
    """Whether it is a virtual environment or git's storage: many files that a training does not write."""
    return (folder / "pyvenv.cfg").exists() or (folder / "HEAD").exists()


def _link_target(link: Path, source: Path) -> Path:
    """The target for a link in the copy: the copy for links within the folder, else the real file."""
    target = link.readlink()
    is_within = not target.is_absolute() and link.resolve().is_relative_to(source.resolve())
    return target if is_within else link.parent / target


def _cloned(source: Path, target: Path) -> bool:
    """Whether the file system made a copy that shares its blocks; if not, nothing is left."""
    with source.open("rb") as old, target.open("xb") as new:
        try:
            fcntl.ioctl(new, _CLONE, old.fileno())
        except OSError:
            target.unlink()
            return False
    return True
