"""What NVIDIA's driver says through its own library of C: neither torch nor another package is needed."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any


def cuda_of_driver(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[int, int] | None:
    """The newest CUDA that the driver serves, such as (12, 8); None without a driver.

    Args:
        load: opens a library of C by its name.
    """
    library = _library(load)
    number = ctypes.c_int(0)
    if library is None or library.cuDriverGetVersion(ctypes.byref(number)) or not number.value:
        return None
    return cuda_version(number.value)


def cuda_version(number: int) -> tuple[int, int]:
    """12080 as (12, 8)."""
    return number // 1000, number % 1000 // 10


def visible_uuids(load: Callable[[str], Any] = ctypes.CDLL) -> list[str]:
    """UUIDs of the devices that CUDA shows to this process, in its order; no context is made on them.

    CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER are in it. Empty where there is no driver or no device.

    Args:
        load: opens a library of C by its name.
    """
    library = _library(load)
    found: list[str] = []
    for device in _devices(library):
        raw = (ctypes.c_ubyte * 16)()
        if library.cuDeviceGetUuid_v2(ctypes.byref(raw), device):  # of a part of a GPU, its own
            return found
        text = bytes(raw).hex()
        found.append("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))
    return found


def _library(load: Callable[[str], Any]) -> Any:
    try:
        return load("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _devices(library: Any) -> list[ctypes.c_int]:
    count = ctypes.c_int(0)
    if library is None or library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        if library.cuDeviceGet(ctypes.byref(device), ordinal):
            break
        found.append(device)
    return found
