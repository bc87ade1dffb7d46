"""Keep the memory of freed tensors in the process, so that steps do not allocate and clear pages again.

让进程保留已释放张量的内存，每一步就不必重新取得并清零内存页。

Source: original; the parameters are those of mallopt(3) of the GNU C library.

By default the GNU C library returns large blocks and the end of its heap to the system as soon as they are
free. The next step gets the same pages again, with one page fault per 4 KiB, and the system clears them. How
often that happens depends on the position of small blocks, so that the time of the same command varies.

Not for a process that runs long after a peak and should become small again, nor under `ulimit -v` or `-d`.
No effect with jemalloc or tcmalloc, on systems other than Linux, or on GPU memory.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = 2**31 - 1  # free bytes at the end of the heap above which they are returned
_MAX_KEPT = 2**30  # bytes; larger blocks are mapped separately and returned
_MAX_KEPT_OLD = 2**25  # the limit of older versions of the library
# Older versions refuse larger values, and the other variable alone is harmful: it maps each block of 128 KiB.
KEEP_FREED = {"MALLOC_TRIM_THRESHOLD_": f"{_NEVER}", "MALLOC_MMAP_THRESHOLD_": f"{_MAX_KEPT_OLD}"}
"""Environment variables with this effect, for scripts that cannot be changed; keep blocks up to 32 MiB."""


def can_keep_freed() -> bool:
    """Whether this process uses the GNU C library, and has no memory limit (`ulimit -v`, `-d`).

    Kept memory would count towards such a limit, and leave oneDNN too little for its code.

    Example:
        >>> keep_freed_memory() <= can_keep_freed()
        True
    """
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "mallopt"):  # musl has no mallopt
        return False
    import resource  # only on Unix

    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return all(limit == resource.RLIM_INFINITY for limit in limits)


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory from now on, in this process and its forks.

    Call it before the first step. Memory then stays close to its peak.

    Returns:
        Whether the memory is kept; see `can_keep_freed`.

    Example:
        >>> is_kept = keep_freed_memory()
    """
    if not can_keep_freed():
        return False
    libc = ctypes.CDLL(None)
    is_set = bool(libc.mallopt(_MMAP_THRESHOLD, _MAX_KEPT))
    is_set = is_set or bool(libc.mallopt(_MMAP_THRESHOLD, _MAX_KEPT_OLD))
    return is_set and bool(libc.mallopt(_TRIM_THRESHOLD, _NEVER))
