"""Asks NVIDIA's driver through its C library, without torch or another package."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any


def cuda_of_driver(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[int, int] | None:
    """The driver's newest CUDA version, such as (12, 8); None without a driver."""
    library = _library(load)
    number = ctypes.c_int(0)
    if library is None or library.cuDriverGetVersion(ctypes.byref(number)) or not number.value:
        return None
    return cuda_version(number.value)


def cuda_version(number: int) -> tuple[int, int]:
    """12080 as (12, 8)."""
    return number // 1000, number % 1000 // 10


def visible_uuids(load: Callable[[str], Any] = ctypes.CDLL) -> list[str]:
    """UUIDs of CUDA's devices for this process, in its order, without making a context.

    CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER apply. Empty without a driver or device.
    """
    library = _library(load)
    uuids: list[str] = []
    for device in _devices(library):
        raw = (ctypes.c_ubyte * 16)()
        if library.cuDeviceGetUuid_v2(ctypes.byref(raw), device):  # v2: a MIG instance has its own
            return uuids
        text = bytes(raw).hex()
        uuids.append("-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])))
    return uuids


def _library(load: Callable[[str], Any]) -> Any:
    try:
        return load("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def _devices(library: Any) -> list[ctypes.c_int]:
    count = ctypes.c_int(0)
    if library is None or library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count)):
        return []
    devices = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        if library.cuDeviceGet(ctypes.byref(device), ordinal):
            break
        devices.append(device)
    return devices
