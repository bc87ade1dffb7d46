"""`flambeau gpus`: what runs on the NVIDIA GPUs here, and for which user; it changes nothing there."""

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flambeau.cli.nvidia_driver import cuda_version, visible_uuids
from flambeau.cli.table import print_json, print_table
from flambeau.errors import InputError
from flambeau.optional_packages import extra
from flambeau.terminal import print_text

HELP = "show what runs on the GPUs, whose it is, and which one is cuda:0 here"

_GIB = 2**30
_HIDDEN = _GIB  # more bytes in use belong to processes that are not visible here; chosen
_GPU = ("GPU", "in torch", "name", "memory GiB", "busy", "state", "UUID")
_PROCESS = ("GPU", "pid", "user", "memory GiB", "time", "command")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    with _nvml() as nvml:
        report = {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "cuda_of_driver": "{}.{}".format(*cuda_version(nvml.nvmlSystemGetCudaDriverVersion())),
            "environment": {name: os.environ.get(name) for name in _VARIABLES},
            "gpus": [asdict(gpu) for gpu in gpus(nvml, visible_uuids())],
        }
    if arguments.json:
        print_json([report])
    else:
        _print(report)
    return 0


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """The library of the driver, started; its errors become a message."""
    pynvml: Any = extra("pynvml", what="flambeau gpus")
    try:
        pynvml.nvmlInit()
        try:
            yield pynvml
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise InputError(
            f"the NVIDIA driver does not answer: {error}\n"
            "A machine without such a GPU has none; a container sees it if it is started with "
            "--gpus all"
        ) from error


@dataclass(frozen=True)
class Process:
    """A process that uses a GPU; None for unknown, as in another container.

    Attributes:
        pid: the driver's, outside of containers.
        kind: 'compute' or 'graphics'.
        seconds: since its start.
    """

    pid: int
    kind: str
    user: str | None
    command: str | None
    memory_bytes: int | None
    seconds: float | None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or its MIG instance; None for unknown.

    Attributes:
        index: as in nvidia-smi, by PCI bus; of a MIG instance '0:1', GPU and instance.
        uuid: fixed, whatever the order.
        cuda: its name in a program from this shell, such as 'cuda:0'.
        memory_used_bytes: by all processes and the driver.
        utilization_percent: share of the last moments in which anything ran.
    """

    index: str
    uuid: str | None
    name: str | None
    cuda: str | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization_percent: int | None
    temperature_celsius: int | None
    power_watts: float | None
    processes: tuple[Process, ...] | None


def gpus(nvml: Any, uuids: list[str]) -> Iterator[Gpu]:
    """All GPUs, each before its MIG instances; `uuids` are those of the devices that CUDA shows."""
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        yield _gpu(nvml, device, str(index), uuids)
        mode = _query(nvml, "nvmlDeviceGetMigMode", device)
        if mode is None or not mode[0]:
            continue
        for number in range(_query(nvml, "nvmlDeviceGetMaxMigDeviceCount", device) or 0):
            part = _query(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", device, number)
            if part is not None:
                yield _gpu(nvml, part, f"{index}:{number}", uuids)


def _gpu(nvml: Any, device: Any, index: str, uuids: list[str]) -> Gpu:
    uuid = _query(nvml, "nvmlDeviceGetUUID", device)
    memory = _query(nvml, "nvmlDeviceGetMemoryInfo", device)
    rates = _query(nvml, "nvmlDeviceGetUtilizationRates", device)
    power = _query(nvml, "nvmlDeviceGetPowerUsage", device)  # mW
    bare = (uuid or "").partition("-")[2]
    return Gpu(
        index=index,
        uuid=uuid,
        name=_query(nvml, "nvmlDeviceGetName", device),
        cuda=f"cuda:{uuids.index(bare)}" if bare in uuids else None,
        memory_used_bytes=None if memory is None else memory.used,
        memory_total_bytes=None if memory is None else memory.total,
        utilization_percent=None if rates is None else rates.gpu,
        temperature_celsius=_query(nvml, "nvmlDeviceGetTemperature", device, 0),
        power_watts=None if power is None else power / 1000,
        processes=_processes(nvml, device),
    )


def _query(nvml: Any, function: str, *arguments: Any) -> Any:
    """The result of a driver function; None if there is none: another version, MIG, no permission."""
    call = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):
        return None


def _processes(nvml: Any, device: Any) -> tuple[Process, ...] | None:
    kinds = {
        "compute": _query(nvml, "nvmlDeviceGetComputeRunningProcesses", device),
        "graphics": _query(nvml, "nvmlDeviceGetGraphicsRunningProcesses", device),
    }
    if kinds["compute"] is None:
        return None
    return tuple(
        Process(one.pid, kind, *_who(one.pid), one.usedGpuMemory, _age(one.pid))
        for kind, listed in kinds.items()
        for one in listed or []
    )


def _who(pid: int, proc: Path = Path("/proc")) -> tuple[str | None, str | None]:
    """User and command line of a process, as far as /proc shows them."""
    match = re.search(r"^Uid:\s+(\d+)", _read(proc / str(pid) / "status"), re.MULTILINE)
    if match is None:
        return None, None
    uid = int(match[1])
    words = _read(proc / str(pid) / "cmdline").rstrip("\0").replace("\0", " ") or None
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name, words
    except (ImportError, KeyError):  # Windows; a user of another container
        return str(uid), words


def _age(pid: int, proc: Path = Path("/proc")) -> float | None:
    """Seconds since a process was started: field 22 of proc_pid_stat(5), in ticks since the boot."""
    try:
        fields = _read(proc / str(pid) / "stat").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (IndexError, ValueError, AttributeError):  # no such process; no Linux
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended, is not readable, or there is no /proc
        return ""


def _print(report: dict[str, Any]) -> None:
    rows = report["gpus"]
    print_text(f"driver {report['driver']}, for CUDA up to {report['cuda_of_driver']}")
    for name, value in report["environment"].items():
        if value is not None:
            print_text(f"{name}={value}")
    print_table(_GPU, map(_cells, rows))
    print_text()
    processes = [(gpu["index"], process) for gpu in rows for process in gpu["processes"] or ()]
    if processes:
        print_table(_PROCESS, (_process_cells(*row) for row in processes), right=("pid",))
    else:
        print_text("no process that is visible from here uses a GPU")
    for gpu in rows:
        used = gpu["memory_used_bytes"] or 0
        if gpu["processes"] is None:
            print_text(f"GPU {gpu['index']}: the driver does not tell which processes use it")
        elif not gpu["processes"] and used > _HIDDEN and not _has_parts(gpu, rows):
            print_text(
                f"GPU {gpu['index']}: {used / _GIB:.1f} GiB are in use by processes that are not visible "
                "from here, such as those of another container"
            )


def _has_parts(gpu: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
    return any(row["index"].startswith(f"{gpu['index']}:") for row in rows)


def _cells(gpu: dict[str, Any]) -> list[str | None]:
    used, total = (gpu[f"memory_{which}_bytes"] for which in ("used", "total"))
    busy, heat, power = (
        gpu[key] for key in ("utilization_percent", "temperature_celsius", "power_watts")
    )
    state = [f"{heat} C"] * (heat is not None) + [f"{power or 0:.0f} W"] * (power is not None)
    return [
        gpu["index"],
        gpu["cuda"],
        gpu["name"],
        None if total is None else f"{used / _GIB:.1f} of {total / _GIB:.1f}",
        None if busy is None else f"{busy} %",
        ", ".join(state) or None,
        gpu["uuid"],
    ]


def _process_cells(index: str, process: dict[str, Any]) -> list[str | None]:
    memory, seconds = process["memory_bytes"], process["seconds"]
    command = process["command"]
    return [
        index,
        str(process["pid"]),
        process["user"],
        None if memory is None else f"{memory / _GIB:.1f}",
        None if seconds is None else _time(seconds),
        command if process["kind"] == "compute" or command is None else f"{command} (graphics)",
    ]


def _time(seconds: float) -> str:
    """93784 seconds as 1-02:03:04, as ps does."""
    days, rest = divmod(int(seconds), 86400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock
