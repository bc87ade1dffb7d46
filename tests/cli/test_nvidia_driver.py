"""What is asked of NVIDIA's library of C, whose part a plain object plays."""

import ctypes
from typing import Any

from flambeau.cli.nvidia_driver import cuda_of_driver, cuda_version, visible_uuids

FIRST, SECOND = "11111111-2222-3333-4444-555555555555", "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"


class Library:
    """What libcuda answers: 0, or the number of an error."""

    def __init__(self, uuids: list[str], *, error: int = 0) -> None:
        self._raw, self._error = [bytes.fromhex(uuid.replace("-", "")) for uuid in uuids], error

    def cuInit(self, flags: int) -> int:  # noqa: N802 - CUDA's names
        assert flags == 0
        return self._error

    def cuDriverGetVersion(self, number: Any) -> int:  # noqa: N802
        number._obj.value = 12080
        return self._error

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self._raw)
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = 100 + ordinal
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: ctypes.c_int) -> int:  # noqa: N802
        uuid._obj[:] = self._raw[device.value - 100]
        return 0


def missing(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def test_devices_are_in_the_order_of_cuda() -> None:
    def two(_: str) -> Library:
        return Library([SECOND, FIRST])

    assert visible_uuids(two) == [SECOND, FIRST]
    assert cuda_of_driver(two) == (12, 8)


def test_without_a_driver_or_a_device() -> None:
    def no_device(_: str) -> Library:
        return Library([FIRST], error=100)

    for load in (missing, no_device):
        assert visible_uuids(load) == []
        assert cuda_of_driver(load) is None


def test_versions_as_the_driver_counts_them() -> None:
    found = [cuda_version(number) for number in (11000, 12080, 13020)]
    assert found == [(11, 0), (12, 8), (13, 2)]
