"""What a thread waits for, as the kernel reports it."""

import functools
import os
import platform
import threading
from contextlib import suppress
from pathlib import Path

# Numbers of system calls, from the kernel's tables: those that read files or their names, that sleep, that
# wait for another process or machine.
_CALLS = {
    "x86_64": (
        {0, 2, 4, 5, 6, 17, 19, 78, 217, 257, 262, 295, 332},
        {35, 230},
        {7, 23, 45, 47, 232, 271, 281},
    ),
    "aarch64": ({56, 61, 63, 65, 67, 69, 78, 79, 80, 291}, {101, 115}, {22, 72, 73, 207, 212}),
}


@functools.cache
def _file_of(thread: int) -> int | None:
    try:
        return os.open(f"/proc/self/task/{thread}/syscall", os.O_RDONLY)
    except OSError:
        return None


def waits_for(thread: int) -> str:
    """What a thread of this process waits for in the kernel: 'file', 'sleep', 'message' of others, or ''."""
    file = _file_of(thread)
    known = _CALLS.get(platform.machine())
    if file is None or known is None:
        return ""
    try:
        number = int(os.pread(file, 32, 0).split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):  # 'running'
        return ""
    if number == -1:  # blocked, and in no call: a page of a mapped file
        return "file"
    for calls, meaning in zip(known, ("file", "sleep", "message"), strict=True):
        if number in calls:
            return meaning
    return ""


def page_faults() -> tuple[int, float]:
    """Number of page faults of this process without disk access, and kernel seconds; 0 if unknown."""
    try:
        import resource
    except ModuleNotFoundError:  # not on Windows
        return 0, 0.0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_stime


def threads_of_process() -> int:
    """How many threads this process has; 1 if unknown."""
    try:
        return len(list(Path("/proc/self/task").iterdir()))
    except OSError:
        return 1


WATCH_THREADS = "flambeau-doctor"
"""The name of all threads of the watch."""


def run_times() -> dict[int, float]:
    """CPU seconds of each thread of this process by its number, without the watch's own threads."""
    used: dict[int, float] = {}
    watching = {one.native_id for one in threading.enumerate() if one.name == WATCH_THREADS}
    with suppress(OSError):
        for entry in Path("/proc/self/task").iterdir():
            with suppress(OSError, ValueError, IndexError):
                used[int(entry.name)] = int((entry / "schedstat").read_text().split()[0]) / 1e9
    return {thread: seconds for thread, seconds in used.items() if thread not in watching}


def forget_files() -> None:
    """After a fork: the open files belong to the parent's threads."""
    _file_of.cache_clear()
