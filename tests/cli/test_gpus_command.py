"""`flambeau gpus`: what a driver says, in one table; here a driver made up of plain objects."""

import json
import os
import sys
import types
from pathlib import Path
from types import SimpleNamespace as Box
from typing import Any

import pytest

from flambeau.cli import gpus as command

GIB = 2**30
FIRST, SECOND, PART = (f"{k * 11111111:08}-0000-0000-0000-00000000000{k}" for k in (1, 2, 3))


class NVMLError(Exception):
    """As of pynvml."""


class NVMLLibraryMismatchError(Exception):
    """As of pynvml."""


class Driver(types.ModuleType):
    """A module pynvml with two GPUs, the second cut by MIG; it keeps the names of what is called."""

    NVMLError, NVMLLibraryMismatchError = NVMLError, NVMLLibraryMismatchError

    def __init__(self, *, processes: list[Any] | None, used: int = 2 * GIB) -> None:
        super().__init__("pynvml")
        self.calls: list[str] = []
        self._answers: dict[str, Any] = {
            "Init": lambda: None,
            "Shutdown": lambda: None,
            "SystemGetDriverVersion": lambda: "570.86.15",
            "SystemGetCudaDriverVersion": lambda: 12080,
            "DeviceGetCount": lambda: 2,
            "DeviceGetHandleByIndex": lambda index: index,
            "DeviceGetUUID": lambda d: f"MIG-{PART}" if d == "part" else f"GPU-{(FIRST, SECOND)[d]}",
            "DeviceGetName": lambda d: f"Big {d}",
            "DeviceGetMemoryInfo": lambda d: Box(used=used, total=80 * GIB),
            "DeviceGetUtilizationRates": self._of_whole(lambda d: Box(gpu=97)),
            "DeviceGetTemperature": self._of_whole(lambda d, sensor: 60),
            "DeviceGetPowerUsage": self._of_whole(lambda d: 301_900),
            "DeviceGetComputeRunningProcesses": lambda d: self._running(processes if d == 0 else []),
            "DeviceGetGraphicsRunningProcesses": self._of_whole(lambda d: []),
            "DeviceGetMigMode": lambda d: [d, d],
            "DeviceGetMaxMigDeviceCount": lambda d: 2,
            "DeviceGetMigDeviceHandleByIndex": self._part,
        }  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name.removeprefix("nvml") not in self._answers:
            raise AttributeError(name)
        self.calls.append(name)
        return self._answers[name.removeprefix("nvml")]

    def answer(self, name: str, function: Any) -> None:
        """From now on."""
        self._answers[name] = function

    def forget(self, name: str) -> None:
        """As a version of the binding without this function."""
        del self._answers[name]

    @staticmethod
    def _of_whole(answer: Any) -> Any:
        def told(device: Any, *more: Any) -> Any:
            if device == "part":
                raise NVMLError("Not Supported")
            return answer(device, *more)

        return told

    @staticmethod
    def _running(processes: list[Any] | None) -> list[Any]:
        if processes is None:
            raise NVMLLibraryMismatchError("Unversioned function called")
        return processes

    @staticmethod
    def _part(device: int, number: int) -> str:
        if number:
            raise NVMLError("Not Found")
        return "part"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts a driver there, on which CUDA's order is the other way round."""

    def put(**settings: Any) -> Driver:
        driver = Driver(**settings)
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        monkeypatch.setattr(command, "visible_uuids", lambda: [SECOND, FIRST])
        return driver

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return put


def mine(memory: int | None = GIB) -> Box:
    return Box(pid=os.getpid(), usedGpuMemory=memory)


def test_all_of_it_as_json(flambeau: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    driver = start(processes=[mine(), Box(pid=2**22 + 1, usedGpuMemory=None)])
    answer = flambeau("gpus --json")
    assert (answer.code, answer.err) == (0, "")
    report = json.loads(answer.out)
    assert (report["driver"], report["cuda_of_driver"]) == ("570.86.15", "12.8")
    assert report["environment"] == {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": None}
    whole, other, part = report["gpus"]
    here, unknown = whole.pop("processes")
    assert whole == {
        "index": "0", "uuid": f"GPU-{FIRST}", "name": "Big 0", "cuda": "cuda:1",
        "memory_used_bytes": 2 * GIB, "memory_total_bytes": 80 * GIB, "utilization_percent": 97,
        "temperature_celsius": 60, "power_watts": 301.9,
    }  # fmt: skip
    assert (here["pid"], here["kind"], here["memory_bytes"]) == (os.getpid(), "compute", GIB)
    assert "python" in here["command"] and here["user"] and 0 <= here["seconds"] < 1e6
    assert unknown == {
        "pid": 2**22 + 1, "kind": "compute", "user": None, "command": None, "memory_bytes": None,
        "seconds": None,
    }  # fmt: skip
    assert (other["index"], other["cuda"]) == ("1", "cuda:0")
    assert (part["index"], part["uuid"], part["cuda"]) == ("1:0", f"MIG-{PART}", None)
    assert part["utilization_percent"] is None
    assert driver.calls[0] == "nvmlInit" and driver.calls[-1] == "nvmlShutdown"
    assert all(name.startswith(("nvmlDeviceGet", "nvmlSystemGet")) for name in driver.calls[1:-1])


def test_the_table(flambeau: Any, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr(command, "_who", lambda pid: ("ada", "python train.py\x1b[31m"))
    monkeypatch.setattr(command, "_age", lambda pid: 93784.9)
    start(processes=[mine(), mine(None)])
    first, variable, head, one, two, part, empty, *processes = flambeau("gpus").out.splitlines()
    assert first == "driver 570.86.15, for CUDA up to 12.8"
    assert variable == "CUDA_DEVICE_ORDER=PCI_BUS_ID"
    assert head.split() == ["GPU", "in", "torch", "name", "memory", "GiB", "busy", "state", "UUID"]
    assert one.split("  ")[0] == "0"
    for cell in ("cuda:1", "Big 0", "2.0 of 80.0", "97 %", "60 C, 302 W", f"GPU-{FIRST}"):
        assert cell in one
    assert "cuda:0" in two and part.startswith("1:0  -")
    assert empty == ""
    assert [line.split() for line in processes[:3]] == [
        ["GPU", "pid", "user", "memory", "GiB", "time", "command"],
        ["0", str(os.getpid()), "ada", "1.0", "1-02:03:04", "python", "train.py\\x1b[31m"],
        ["0", str(os.getpid()), "ada", "-", "1-02:03:04", "python", "train.py\\x1b[31m"],
    ]


def test_memory_of_nobody_who_is_visible(flambeau: Any, start: Any) -> None:
    start(processes=[])
    said = flambeau("gpus").out
    assert "no process that is visible from here uses a GPU" in said
    assert "GPU 0: 2.0 GiB are in use by processes that are not visible from here" in said
    assert "GPU 1: " not in said  # of which the parts tell
    start(processes=[], used=GIB // 2)
    assert "in use by" not in flambeau("gpus").out
    start(processes=None)
    assert "GPU 0: the driver does not tell which processes use it" in flambeau("gpus").out


def test_another_version_of_the_binding(flambeau: Any, start: Any) -> None:
    start(processes=[]).forget("DeviceGetTemperature")
    report = json.loads(flambeau("gpus --json").out)
    assert [gpu["temperature_celsius"] for gpu in report["gpus"]] == [None] * 3


def test_without_the_package(flambeau: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    answer = flambeau("gpus")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        "flambeau: flambeau gpus needs the package nvidia-ml-py\n"
        "Install it: pip install 'flambeau[gpu]'\n"
    )


def test_a_driver_that_does_not_answer(flambeau: Any, start: Any) -> None:
    driver = start(processes=[])

    def fail() -> None:
        raise NVMLError("Driver Not Loaded")

    driver.answer("Init", fail)
    answer = flambeau("gpus")
    assert (answer.code, answer.out) == (2, "")
    assert "the NVIDIA driver does not answer: Driver Not Loaded\n" in answer.err
    assert "nvmlShutdown" not in driver.calls


def test_without_a_driver(flambeau: Any) -> None:
    """The real library."""
    pynvml = pytest.importorskip("pynvml")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        answer = flambeau("gpus")
        assert (answer.code, answer.out) == (2, "")
        assert "does not answer: NVML Shared Library Not Found\n" in answer.err
        assert "--gpus all" in answer.err
    else:
        pynvml.nvmlShutdown()
        assert flambeau("gpus").code == 0


def test_what_proc_tells(tmp_path: Path) -> None:
    """Of a user without a name, of a command with a bracket in its name, and of a process that has ended."""
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "cmdline").write_bytes(b"python\0a b.py\0")
    (folder / "status").write_text("Name:\tpython\nUid:\t4000000\t0\t0\t0\n")
    (folder / "stat").write_text("7 (a) b)) S " + " ".join(["0"] * 18) + " 100 0")
    assert command._who(7, tmp_path) == ("4000000", "python a b.py")
    age = command._age(7, tmp_path)
    assert age is not None and age > 0
    assert (command._who(8, tmp_path), command._age(8, tmp_path)) == ((None, None), None)
