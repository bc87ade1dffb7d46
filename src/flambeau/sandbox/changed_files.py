"""Finds files of some folders that were changed, made or removed; for trials that may write."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_MOST_FILES = 1_000_000
"""In all folders together; chosen: some ten seconds of a local disk."""


class ChangedFiles:
    """Lists folders now, and compares them at the end."""

    def __init__(self, folders: Sequence[Path]) -> None:
        resolved = sorted({folder.resolve() for folder in folders})
        self.folders = [
            one
            for one in resolved
            if not any(one != top and one.is_relative_to(top) for top in resolved)
        ]
        self.is_complete = True
        self._before = self._list()

    def changes(self, *, except_in: Sequence[Path] = ()) -> list[tuple[str, Path]]:
        """Changes since then, by path: ("changed", "made" or "removed", path)."""
        after = self._list()
        changes = []
        for name in sorted({*self._before, *after}):
            path = Path(name)
            if self._before.get(name) == after.get(name) or any(
                path.is_relative_to(one) for one in except_in
            ):
                continue
            if name not in self._before:
                what = "made"
            else:
                what = "changed" if name in after else "removed"
            changes.append((what, path))
        return changes

    def _list(self) -> dict[str, tuple[int, ...]]:
        """By path, facts that change with content, name, mode or owner; users cannot set st_ctime."""
        files: dict[str, tuple[int, ...]] = {}
        for folder in self.folders:
            for entry in _entries(str(folder)):
                if len(files) >= _MOST_FILES:
                    self.is_complete = False
                    return files
                facts = entry.stat(follow_symlinks=False)
                files[entry.path] = (
                    facts.st_ino,
                    facts.st_size,
                    facts.st_mtime_ns,
                    facts.st_ctime_ns,
                )
        return files


def _entries(folder: str) -> "Iterator[os.DirEntry[str]]":
    """All files and links in a folder; folders themselves add no information."""
    waiting = [folder]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # not readable for this user, or removed
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            else:
                yield entry
