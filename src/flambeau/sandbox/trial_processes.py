"""The processes of a trial, whoever started them: they have its mark, or its mount namespace."""

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from flambeau.sandbox.inside_trial import MARK
from flambeau.sandbox.mount_syscalls import system_call

_PROC = Path("/proc")
_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def processes_of(folder: Path, namespace: str | None = None) -> Iterator[int]:
    """The living processes, by number; none on systems without /proc.

    A process without its environment is still in the trial's mount `namespace` (/proc/PID/ns/mnt). Only
    descendants of this process count: the kernel gives an ended trial's number to the next, perhaps of
    another doctor.
    """
    mark = os.fsencode(f"{MARK}={folder}")
    if namespace == _namespace_of("self"):  # the trial has no namespace
        namespace = None
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            is_marked = mark in (entry / "environ").read_bytes().split(b"\0")
            is_inside = namespace is not None and _namespace_of(entry.name) == namespace
            if is_marked or (is_inside and _is_descendant(int(entry.name))):
                yield int(entry.name)


def adopted_processes() -> Iterator[int]:
    """Children of this process in another session: commands of trials, and orphans that they left."""
    session = os.getsid(0)
    for entry in _PROC.glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent, its_session = _parent_and_session(int(entry.name))
            if parent == os.getpid() and its_session != session:
                yield int(entry.name)


def adopt_orphans(yes: bool) -> None:
    """Whether orphans of a command become children of this process, so that they can be found."""
    with suppress(OSError):
        system_call("prctl", _CHILD_SUBREAPER, ctypes.c_ulong(yes))


def end_processes(
    folder: Path,
    group: int | None = None,
    namespace: str | None = None,
    earlier: Collection[int] | None = None,
) -> None:
    """Kill the remaining processes of a trial: its group, all with its mark or view, and its orphans.

    Orphans are the adopted processes that are not in `earlier`; None leaves them alone.
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


def _is_descendant(process: int) -> bool:
    """Whether a process comes from this one, which adopts its orphans."""
    while process > 1:
        if process == os.getpid():
            return True
        process, _ = _parent_and_session(process)
    return False


def _parent_and_session(process: int) -> tuple[int, int]:
    """Their numbers; OSError if the process has ended."""
    # After the name, which may contain anything and ends with the last parenthesis.
    fields = (_PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    return int(fields[1]), int(fields[3])


def _namespace_of(process: str) -> str | None:
    try:
        return str((_PROC / process / "ns" / "mnt").readlink())
    except OSError:
        return None
