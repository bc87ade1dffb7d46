"""Find the largest batch that fits into memory by trying, and tell out of memory from other errors.

试出内存放得下的最大批次，并把内存不足与其他错误区分开。

Source: own. The search is known as Lightning's BatchSizeFinder and Accelerate's find_executable_batch_size;
here a part of the memory stays free, and on a CPU the process has a limit during a trial (setrlimit(2),
RLIMIT_DATA): without one the kernel would kill it.

Not for a model of which each process holds a part (FSDP): a trial that fails on one leaves the others
waiting. A CPU needs Linux.
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

# Of errors that are not torch.OutOfMemoryError: of the CPU, of Apple's MPS, of CUDA and its libraries.
_WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "std::bad_alloc",
    "_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",  # of the C library
    "could not create a primitive",
    "could not create a memory",  # oneDNN, which has no other words for it
)
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of mallopt(3)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out, on whatever device.

    Example:
        >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."))
        True
        >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return type(error) in (RuntimeError, torch.AcceleratorError) and any(
        words in str(error) for words in _WORDS
    )


def release_memory(error: BaseException | None = None) -> None:
    """Give back what nobody needs, after memory has run out.

    Args:
        error: that was caught: the frames in its traceback hold all tensors of the pass that has failed. The
            variables of functions that still run stay. With one, glibc maps tensors of 1 MiB and more on
            their own from then on: it keeps freed ones of up to 32 MiB in pieces that fit nothing.

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
    """Memory that this process can still take from the machine, and from its own limits (`ulimit -v`, `-d`).

    Not of a container, whose limit is a file of its cgroup.

    Raises:
        OSError: not on Linux.

    Example:
        >>> free_bytes() > 2**20  # doctest: +SKIP
        True
    """
    import resource  # Unix alone has it

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
    """Let this process take so many bytes more and no others: beyond, an allocation fails with an error.

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
    """The largest of some batch sizes with which a trial does not run out of memory.

    The largest is tried first, then the search halves what is left: a size fits if a larger one does.

    Args:
        trial: makes a training step with so many samples; what it needs later, such as the state of the
            optimizer, must be there in it.
        sizes: to choose from, in any order.
        device: on which it computes.
        headroom: share of the memory that stays free in a trial, from 0 to below 1.
        limit_bytes: on a CPU, how much more memory this process may take; None is `free_bytes()`.

    Returns:
        None if not even the smallest fits.

    Raises:
        ValueError: no sizes, or a share out of range.
        OSError: on a CPU where there is no Linux.

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
    at = len(ordered) - 1
    while fitting + 1 < failing:
        if _fits(partial(trial, ordered[at]), kept_free()):
            fitting = at
        else:
            failing = at
        at = (fitting + failing) // 2
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
    """Occupy a share of the memory of a device."""
    memory_info = (
        torch.cuda.mem_get_info if device.type == "cuda" else torch.accelerator.get_memory_info
    )
    held = torch.empty(int(memory_info(device)[1] * share), dtype=torch.uint8, device=device)
    yield
    del held
