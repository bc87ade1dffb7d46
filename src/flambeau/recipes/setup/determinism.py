"""Make torch choose deterministic algorithms, or report which operation has none.

让 torch 只选用确定性算法；若某个操作没有，则明确报出。

Source: torch's note on reproducibility, and "Results reproducibility" in NVIDIA's cuBLAS manual.

Two runs agree to the bit on the same hardware with the same versions of all software; with other devices,
versions or numbers of threads they do not. Seeds and the order of samples must be set separately.

Not for timing: deterministic kernels are slower, some of them many times.
"""

import os
import sys
import warnings

import torch
import torch.utils.deterministic

_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC = (":4096:8", ":16:8")  # the only two values that torch and cuBLAS accept as such
COMPILER_VARIABLE = "TORCHINDUCTOR_DETERMINISTIC"  # torch/_inductor/config.py, since torch 2.10


def make_deterministic(*, warn_only: bool = False) -> None:
    """Set all of torch's switches for determinism, for the whole process.

    Call it before the first CUDA operation, because cuBLAS reads its environment variable once. `torch.empty`
    is not filled with NaN, as deterministic mode would: that costs a write of every new tensor and only
    reveals reads of uninitialised memory.

    Args:
        warn_only: an operation without a deterministic algorithm warns instead of raising.

    Raises:
        ValueError: CUBLAS_WORKSPACE_CONFIG has a value that is not deterministic.
        RuntimeError: CUDA is initialized already without that variable (a UserWarning with `warn_only`).

    Example:
        >>> make_deterministic()
        >>> torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
        (True, False)
        >>> use_deterministic(False)  # and back
        >>> torch.backends.cudnn.deterministic = False
        >>> torch.utils.deterministic.fill_uninitialized_memory = True
    """
    _fix_cublas(warn_only=warn_only)
    use_deterministic(True, warn_only=warn_only)
    # Benchmarking picks the kernel that is fastest in a trial, which may differ from run to run.
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def use_deterministic(mode: bool, /, *, warn_only: bool = False) -> None:
    """`torch.use_deterministic_algorithms`, without its import of torch.compile, 2 s of a processor's time.

    torch imports the compiler for one setting; where nothing has imported it yet, that setting's environment
    variable is set instead.

    Args:
        warn_only: an operation without a deterministic algorithm warns instead of raising.

    Example:
        >>> use_deterministic(True, warn_only=True)
        >>> torch.is_deterministic_algorithms_warn_only_enabled()
        True
        >>> use_deterministic(False)
    """
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        return
    os.environ[COMPILER_VARIABLE] = str(int(mode))
    torch.set_deterministic_debug_mode(0 if not mode else 1 if warn_only else 2)


def _fix_cublas(*, warn_only: bool) -> None:
    value = os.environ.get(_VARIABLE)
    if value is None and torch.cuda.is_initialized():
        message = (
            f"CUDA is in use and {_VARIABLE} is not set, so matrix products may differ from run to run: "
            f"call make_deterministic() earlier, or start with {_VARIABLE}={_DETERMINISTIC[0]}"
        )
        if not warn_only:
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=3)
        return
    if value is not None and value not in _DETERMINISTIC:
        raise ValueError(
            f"{_VARIABLE} must be one of {', '.join(_DETERMINISTIC)} to be deterministic, got {value!r}"
        )
    # It costs about 24 MiB of GPU memory (NVIDIA's manual); ':16:8' costs less but is slower.
    os.environ[_VARIABLE] = value or _DETERMINISTIC[0]
