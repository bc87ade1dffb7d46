"""The processes of a trial, whoever started them: they carry its mark, or have its mount namespace."""

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from flambeau.sandbox.inside import MARK
from flambeau.sandbox.mounts import system_call

_PROC = Path("/proc")
_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def processes_of(folder: Path, namespace: str | None = None) -> Iterator[int]:
    """Those that live, by number; on systems without /proc none are found.

    Args:
        folder: of the trial.
        namespace: the mount namespace of the trial as /proc/PID/ns/mnt names it, which a process keeps that
            has cleared its environment.
    """
    mark = os.fsencode(f"{MARK}={folder}")
    if namespace == _namespace_of("self"):  # the trial has none of its own
        namespace = None
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
            if is_marked or (namespace is not None and _namespace_of(entry.name) == namespace):
                yield int(entry.name)


def adopted_processes() -> Iterator[int]:
    """Children of this process in another session: commands of trials, and orphans that these left."""
    session = os.getsid(0)
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            # Behind the name, which may hold anything and ends with the last parenthesis.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and int(fields[3]) != session:
                yield int(entry.name)


def adopt_orphans(yes: bool) -> None:
    """Whether what a command leaves behind becomes a child of this process, so that it can be found."""
    with suppress(OSError):
        system_call("prctl", _CHILD_SUBREAPER, ctypes.c_ulong(yes))


def end_processes(
    folder: Path,
    group: int | None = None,
    namespace: str | None = None,
    earlier: Collection[int] | None = None,
) -> None:
    """Kill what is left of a trial: its group, all with its mark or its view, and the orphans that it left.

    Args:
        folder: of the trial.
        group: process group of the command; None if that is not known.
        namespace: see `processes_of`.
        earlier: what `adopted_processes` gave before it was started; None leaves such processes alone.
    """
    if group is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for _ in range(50):
        left = set(processes_of(folder, namespace))
        if earlier is not None:
            left |= set(adopted_processes()) - set(earlier)
        left.discard(group or 0)
        for process in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(process, os.WNOHANG)
        if not left:
            return
        time.sleep(0.02)


def _namespace_of(process: str) -> str | None:
    try:
        return str((_PROC / process / "ns" / "mnt").readlink())
    except OSError:
        return None
