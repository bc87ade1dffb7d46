"""The disk operations of real code below a folder, and what a power cut may leave of each moment.

Whenever Python calls fsync, rename, replace, unlink, rmdir or mkdir, the folder is read before and after.
So what libraries write and name is seen too; what they sync themselves counts as not synced.
A call that moves a name from one folder to another, or over another, is one change, which is kept whole or
not at all: file systems with a journal promise that.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Change = dict[tuple[int, str], int | None]
"""Names by folder that point to another node from then on; None where a name is gone."""
Tree = dict[str, bytes | None]
"""Content by path; None for a folder."""
_CALLS = ("rename", "replace", "unlink", "remove", "rmdir", "mkdir")


@dataclass(frozen=True)
class Moment:
    """What is on the disk, and what only in the memory of the machine.

    Attributes:
        files: what was synced of each file, and its content.
        names: synced names in each folder.
        changes: of names since, in order.
    """

    top: int
    files: dict[int, tuple[bytes, bytes]]
    names: dict[int, dict[str, int]]
    changes: tuple[Change, ...]

    def left(
        self, keep: Callable[[list[Change]], list[Change]], data: Callable[[bytes, bytes], bytes]
    ) -> Tree:
        """What a cut leaves that keeps these changes of names, and this of files that were not synced."""
        names = {folder: dict(inside) for folder, inside in self.names.items()}
        for change in keep(list(self.changes)):
            _apply(names, change)
        found: Tree = {}

        def walk(folder: int, path: str) -> None:
            for name, node in names[folder].items():
                if node in names:
                    found[path + name] = None
                    walk(node, f"{path}{name}/")
                else:
                    synced, content = self.files[node]
                    found[path + name] = synced if synced == content else data(synced, content)

        walk(self.top, "")
        return found


def _apply(names: dict[int, dict[str, int]], change: Change) -> None:
    for (folder, name), node in change.items():
        if node is None:
            names[folder].pop(name, None)
        else:
            names[folder][name] = node


def put(tree: Tree, folder: Path) -> None:
    """Write what is left into a new folder."""
    folder.mkdir(parents=True)
    for name, content in tree.items():
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)


class Recording:
    """Records from `with` on; what is in the folder before counts as synced.

    Attributes:
        moments: before each call, and at last the end.
    """

    def __init__(self, top: Path) -> None:
        self.moments: list[Moment] = []
        self._path = top
        self._handles: dict[int, int] = {}  # held, so that no number of a node is used twice
        self._files: dict[int, tuple[bytes, bytes]] = {}
        self._synced: dict[int, dict[str, int]] = {}
        self._now: dict[tuple[int, str], int] = {}
        self._changes: list[Change] = []
        self._lock = threading.RLock()
        self._real: dict[str, Any] = {}

    def __enter__(self) -> "Recording":
        self._top = self._folder(self._path)
        self._look(as_one=True)
        for node, (_, content) in self._files.items():
            self._files[node] = content, content
        for folder in self._synced:
            self._sync_folder(folder)
        for name in _CALLS:
            self._real[name] = getattr(os, name)
            setattr(os, name, self._recorded(self._real[name]))
        self._real["fsync"] = os.fsync
        os.fsync = self._fsync
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(os, name, real)
        self._note()
        for handle in self._handles.values():
            os.close(handle)

    def _recorded(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **settings: Any) -> Any:
            with self._lock:
                self._note()
                result = real(*args, **settings)
                self._look(as_one=True)
            return result

        return call

    def _fsync(self, file: Any) -> None:
        with self._lock:
            self._note()
            number = file if isinstance(file, int) else file.fileno()
            self._real["fsync"](number)
            node = os.fstat(number).st_ino
            if node in self._files:
                self._files[node] = (self._files[node][1],) * 2
            elif node in self._synced:
                self._sync_folder(node)

    def _sync_folder(self, folder: int) -> None:
        """Its changes are kept from now on, with those before that concern the same names."""
        kept: list[Change] = []
        left: list[Change] = []
        names: set[tuple[int, str]] = set()
        for change in reversed(self._changes):
            if any(where == folder for where, _ in change) or not names.isdisjoint(change):
                kept.append(change)
                names.update(change)
            else:
                left.append(change)
        for change in reversed(kept):
            _apply(self._synced, change)
        self._changes = left[::-1]

    def _note(self) -> None:
        self._look(as_one=False)
        moment = Moment(
            self._top,
            dict(self._files),
            {folder: dict(names) for folder, names in self._synced.items()},
            tuple(self._changes),
        )
        if not self.moments or moment != self.moments[-1]:
            self.moments.append(moment)

    def _look(self, *, as_one: bool) -> None:
        """Read the folder: other content of files, and names that have changed."""
        now: dict[tuple[int, str], int] = {}
        for folder, entry in self._entries(self._path, self._top):
            node = now[folder, entry.name] = entry.inode()
            if entry.is_dir(follow_symlinks=False):
                self._folder(Path(entry.path))
                continue
            if node not in self._handles:
                self._handles[node] = os.open(entry.path, os.O_RDONLY)
                self._files[node] = b"", b""
            size = os.fstat(self._handles[node]).st_size
            synced, before = self._files[node]
            content = os.pread(self._handles[node], size, 0)
            if content != before:
                self._files[node] = synced, content
        keys = [*dict.fromkeys((*self._now, *now))]
        changes: Change = {key: now.get(key) for key in keys if now.get(key) != self._now.get(key)}
        self._now = now
        if as_one and changes:
            self._changes.append(changes)
        else:
            self._changes += [{key: node} for key, node in changes.items()]

    def _folder(self, path: Path) -> int:
        node = path.stat().st_ino
        if node not in self._handles:
            self._handles[node] = os.open(path, os.O_RDONLY)
            self._synced[node] = {}
        return node

    def _entries(self, path: Path, folder: int) -> Iterator[tuple[int, os.DirEntry[str]]]:
        with os.scandir(path) as entries:
            inside = list(entries)
        for entry in inside:
            yield folder, entry
            if entry.is_dir(follow_symlinks=False):
                yield from self._entries(Path(entry.path), entry.inode())
