"""Shared memory of a trial: killed processes leave it in /dev/shm, where it takes memory until a restart."""

import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

_PROC, _FOLDER = Path("/proc"), Path("/dev/shm")
_Files = dict[str, tuple[int, int]]


def shared_files() -> _Files:
    """The user's files in /dev/shm: inode and device by name."""
    found: _Files = {}
    with suppress(OSError), os.scandir(_FOLDER) as entries:
        for entry in entries:
            with suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False) and facts.st_uid == os.geteuid():
                    found[entry.name] = (facts.st_ino, facts.st_dev)
    return found


def mapped(processes: Iterable[int], names: Collection[str]) -> set[str]:
    """Those of some files in /dev/shm that processes have as memory."""
    lines: list[str] = []
    for process in processes:
        with suppress(OSError):
            lines += (_PROC / f"{process}/maps").read_text(errors="surrogateescape").splitlines()
    return _named(lines, names)


def _opened(processes: Iterable[int], names: Collection[str]) -> set[str]:
    links: list[str] = []
    for process in processes:
        for link in (_PROC / f"{process}/fd").glob("*"):
            with suppress(OSError):
                links.append(str(link.readlink()))
    return _named(links, names)


def _named(lines: Iterable[str], names: Collection[str]) -> set[str]:
    parts = (line.rpartition(f"{_FOLDER}/") for line in lines)
    return {name for _, found, name in parts if found and name in names}


def remove_left(files: _Files) -> None:
    """Remove files that no process uses any more; those made anew under their names stay."""
    there = shared_files()
    left = {name for name, file in files.items() if there.get(name) == file}
    if left:
        processes = [int(entry.name) for entry in _PROC.glob("[0-9]*")]
        left -= mapped(processes, left) | _opened(processes, left)
    for name in left:
        with suppress(OSError):
            (_FOLDER / name).unlink()
