"""Which errors tell of a limit of the system."""

import errno
import os

import pytest

from flambeau.errors import shortage


def os_error(number: int, *names: str) -> OSError:
    return OSError(number, os.strerror(number), *names)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), "no further process or thread may be started"),
        (os_error(errno.EAGAIN), "no further process or thread may be started"),
        (RuntimeError("received 0 items of ancdata"), "too many open files"),
        (os_error(errno.EMFILE), "too many open files"),
        (MemoryError(), "memory has run out"),
        (os_error(errno.ENOMEM), "memory has run out"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            "memory has run out",
        ),
    ],
)
def test_a_limit_is_named(error: BaseException, said: str) -> None:
    found = shortage(error)
    assert found is not None
    assert found.startswith(f"{said}; ")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "CUDA out of memory. Tried to allocate 2.00 GiB"
        ),  # of a device, not of the system
        RuntimeError("CUDA error: out of memory"),
        ValueError("mat1 and mat2 shapes cannot be multiplied"),
        os_error(errno.EMFILE, "weights.safetensors"),  # which names its file
        OSError(f"Unable to open weights.pt: {os.strerror(errno.EMFILE)}"),  # as of HDF5
    ],
)
def test_others_are_not(error: BaseException) -> None:
    assert shortage(error) is None
