"""Keep the memory of freed tensors in the process, so that no step has to get and clear its pages again.

让进程保留已释放张量的内存，每一步就不必重新取得并清零内存页。

Source: own; the parameters are those of mallopt(3) of the GNU C library.

By default the GNU C library gives large blocks and the end of its heap back to the system as soon as they are
free. The next step gets the same pages again, one page fault for each 4 KiB, and the system clears them. How
much of that happens depends on where a small block happens to lie, so the same command may take one time or
another.

Not for a process that runs on for long after a peak and should become small again, nor under `ulimit -v` or
`-d`; of no use with jemalloc or tcmalloc, on other systems than Linux, or for the memory of a GPU.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = 2**31 - 1  # bytes that are free at the end of the heap, from which on they are given back
_LARGEST = 2**30  # bytes of a block, from which on it is mapped by itself and given back
_LARGEST_BEFORE = 2**25  # that older versions of the library take
# Where they refuse the one, the other alone does harm: each block of 128 KiB is mapped anew.
KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": f"{_NEVER}", "MALLOC_MMAP_THRESHOLD_": f"{_LARGEST_BEFORE}"}
"""Environment variables that do so for a script that cannot be changed; blocks up to 32 MiB are kept."""


def can_keep_freed() -> bool:
    """Whether this process has the C library of GNU, and no limit of its own (`ulimit -v`, `-d`).

    To such a limit counts what is kept, and oneDNN's code, which cannot use it, finds no room any more.

    Example:
        >>> keep_freed_memory() <= can_keep_freed()
        True
    """
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"):  # musl has none
        return False
    import resource  # Unix alone has it

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return all(limit == resource.RLIM_INFINITY for limit in limits)


def keep_freed_memory() -> bool:
    """Let the C library keep what is freed from now on, for the whole process and what it forks.

    Call it before the first step. What a process holds is then close to the most that it ever needed.

    Returns:
        Whether it can, see `can_keep_freed`.

    Example:
        >>> is_kept = keep_freed_memory()
    """
    if not can_keep_freed():
        return False
    libc = ctypes.CDLL(None)
    takes = bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST))
    takes = takes or bool(libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BEFORE))
    return takes and bool(libc.mallopt(_TRIM_THRESHOLD, _NEVER))
