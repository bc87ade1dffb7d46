"""Which files of some folders were changed, made or removed meanwhile; for trials that may write."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_MOST_FILES = 1_000_000
"""Looked at in all folders together; chosen: some ten seconds of a local disk."""


class ChangedFiles:
    """Looks at folders now, and at the end once more.

    Args:
        folders: with all that is in them; links are not followed.

    Attributes:
        is_complete: whether all of their files were looked at.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        resolved = sorted({folder.resolve() for folder in folders})
        self.folders = [
            one
            for one in resolved
            if not any(one != top and one.is_relative_to(top) for top in resolved)
        ]
        self.is_complete = True
        self._before = self._look()

    def changes(self, *, except_in: Sequence[Path] = ()) -> list[tuple[str, Path]]:
        """What has happened since, by path: ("changed", "made" or "removed", path).

        Args:
            except_in: folders of our own.
        """
        after = self._look()
        found = []
        for name in sorted({*self._before, *after}):
            path = Path(name)
            if self._before.get(name) == after.get(name) or any(
                path.is_relative_to(one) for one in except_in
            ):
                continue
            what = (
                "made"
                if name not in self._before
                else "removed"
                if name not in after
                else "changed"
            )
            found.append((what, path))
        return found

    def _look(self) -> dict[str, tuple[int, ...]]:
        """By path what changes with content, name, mode or owner; the time of change cannot be set."""
        found: dict[str, tuple[int, ...]] = {}
        for folder in self.folders:
            for entry in _entries(str(folder)):
                if len(found) >= _MOST_FILES:
                    self.is_complete = False
                    return found
                facts = entry.stat(follow_symlinks=False)
                found[entry.path] = (
                    facts.st_ino,
                    facts.st_size,
                    facts.st_mtime_ns,
                    facts.st_ctime_ns,
                )
        return found


def _entries(folder: str) -> "Iterator[os.DirEntry[str]]":
    """All files and links below a folder; a folder itself tells nothing that its files do not."""
    waiting = [folder]
    while waiting:
        try:
            entries = list(os.scandir(waiting.pop()))
        except OSError:  # not ours to read, or gone
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            else:
                yield entry
