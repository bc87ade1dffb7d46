"""Disks that can do less than a local one of Linux: NFS and FUSE, exFAT."""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import pytest


def keep_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like NFS and FUSE: a file that is removed while this process has it open stays, under another name."""
    unlink, rmdir = os.unlink, os.rmdir

    def folder_of(path: Any, dir_fd: int | None) -> Path:
        start = Path.cwd() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
        return start / path

    def open_files() -> set[str]:
        found = set()
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):  # that of the listing itself
                found.add(str(descriptor.readlink()))
        return found

    def unlink_as_nfs(path: Any, *, dir_fd: int | None = None) -> None:
        file = folder_of(path, dir_fd)
        if str(file.resolve()) in open_files():
            file.rename(file.with_name(f".nfs{file.stat().st_ino:016x}"))
        else:
            unlink(path, dir_fd=dir_fd)

    def rmdir_as_nfs(path: Any, *, dir_fd: int | None = None) -> None:
        folder = folder_of(path, dir_fd)
        for file in folder.glob(".nfs*"):
            if str(file.resolve()) not in open_files():
                unlink(file)
        rmdir(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink_as_nfs)
    monkeypatch.setattr(os, "rmdir", rmdir_as_nfs)


def refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like exFAT through FUSE."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "symlink", refused)
    monkeypatch.setattr(os, "link", refused)
