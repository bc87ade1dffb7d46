"""Find by trials the largest batch that fits into memory, and recognize out-of-memory errors.

试出内存放得下的最大批次，并把内存不足与其他错误区分开。

Source: original. Similar searches are Lightning's BatchSizeFinder and Accelerate's
find_executable_batch_size. Here a part of the memory stays free, and on a CPU the process has a limit during
a trial (setrlimit(2), RLIMIT_DATA), because otherwise the kernel would kill it.

Not for a sharded model (FSDP): a trial that fails on one process leaves the others waiting. On a CPU only
for Linux.
"""

import contextlib
import ctypes
import gc
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Messages of errors that are not torch.OutOfMemoryError: of the CPU, Apple's MPS, CUDA and its libraries.
_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",  # the C library
    "could not create a primitive",
    "could not create a memory",  # oneDNN, which has no clearer message
)
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt(3)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory has run out, on any device.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return type(error) in (RuntimeError, torch.AcceleratorError) and any(
        message in str(error) for message in _MESSAGES
    )


def release_memory(error: BaseException | None = None) -> None:
    """Release unused memory, after memory has run out.

    Args:
        error: the caught error. The frames of its traceback, which hold the tensors of the failed pass, are
            cleared, but for functions that still run; and glibc is set to map tensors of 1 MiB and more
            separately, because it keeps freed ones of up to 32 MiB in unusable pieces.

    Example:
        >>> release_memory(torch.OutOfMemoryError("CUDA out of memory"))
    """
    has_run_out = error is not None
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__
    gc.collect()
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "malloc_trim"):  # of glibc
        if has_run_out:
            libc.mallopt(_MMAP_THRESHOLD, 2**20)
        libc.malloc_trim(0)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def free_bytes() -> int:
    """Bytes that this process can still allocate, by the machine and its limits (`ulimit -v`, `-d`).

    A container's limit is not included.

    Raises:
        OSError: not on Linux.

    Example:
        >>> free_bytes() > 2**20  # doctest: +SKIP
        True
    """
    import resource  # only on Unix

    left = [_size_in("/proc/meminfo", "MemAvailable")]
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            left.append(limit - _size_in("/proc/self/status", used))
    return max(0, min(left))


def _size_in(file: str, name: str) -> int:
    """A size in a file of /proc, in bytes."""
    lines = Path(file).read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


@contextlib.contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let this process allocate only so many more bytes; beyond that an allocation raises an error.

    Example:
        >>> with memory_limit(2**20):  # doctest: +SKIP
        ...     torch.empty(2**30)
        RuntimeError: ... DefaultCPUAllocator: can't allocate memory ...
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _size_in("/proc/self/status", "VmData") + num_bytes
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def largest_batch(
    trial: Callable[[int], object],
    sizes: Sequence[int],
    *,
    device: torch.device | str = "cpu",
    headroom: float = 0.1,
    limit_bytes: int | None = None,
) -> int | None:
    """The largest of some batch sizes with which a trial fits into memory.

    The largest is tried first, then the search bisects.

    Args:
        trial: makes a training step with that many samples and all that a later one needs, such as optimizer
            state.
        sizes: in any order.
        headroom: fraction of the memory that stays free, in [0, 1).
        limit_bytes: on a CPU, bytes that the process may still allocate; None is `free_bytes()`.

    Returns:
        The size; None if not even the smallest fits.

    Raises:
        ValueError: no sizes, or a headroom out of range.
        OSError: a CPU on a system other than Linux.

    Example:
        >>> def trial(size):
        ...     if size > 100:
        ...         raise torch.OutOfMemoryError("CUDA out of memory")
        >>> largest_batch(trial, [32, 64, 128, 256], limit_bytes=2**30)
        64
    """
    if not sizes or not 0 <= headroom < 1:
        raise ValueError(
            f"sizes must not be empty, and headroom in [0, 1); got {sizes}, {headroom}"
        )
    device, ordered = torch.device(device), sorted(set(sizes))
    if device.type == "cpu":
        limit = free_bytes() if limit_bytes is None else limit_bytes
        kept_free = partial(memory_limit, int(limit * (1 - headroom)))
    else:
        kept_free = partial(_ballast, device, headroom)
    fitting = -1
    failing = len(ordered)
    tried = len(ordered) - 1
    while fitting + 1 < failing:
        if _fits(partial(trial, ordered[tried]), kept_free()):
            fitting = tried
        else:
            failing = tried
        tried = (fitting + failing) // 2
    return ordered[fitting] if fitting >= 0 else None


def _fits(trial: Callable[[], object], kept_free: contextlib.AbstractContextManager[None]) -> bool:
    try:
        with kept_free:
            trial()
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        release_memory(error)
        return False
    release_memory()
    return True


@contextlib.contextmanager
def _ballast(device: torch.device, share: float) -> Iterator[None]:
    """Occupy a fraction of a device's memory."""
    memory_info = (
        torch.cuda.mem_get_info if device.type == "cuda" else torch.accelerator.get_memory_info
    )
    held = torch.empty(int(memory_info(device)[1] * share), dtype=torch.uint8, device=device)
    yield
    del held
