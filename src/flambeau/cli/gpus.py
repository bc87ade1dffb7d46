"""`flambeau gpus`: what runs on the NVIDIA GPUs here, and whose it is; it changes nothing there."""

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flambeau.cli.machine.nvidia_driver import cuda_version, visible_uuids
from flambeau.cli.table import print_json, print_table
from flambeau.errors import InputError
from flambeau.optional_packages import extra

HELP = "show what runs on the GPUs, whose it is, and which one is cuda:0 here"

_GIB = 2**30
_UNSEEN = _GIB  # bytes in use, above which somebody else must hold them; chosen
_GPU = ("GPU", "in torch", "name", "memory GiB", "busy", "state", "UUID")
_PROCESS = ("GPU", "pid", "user", "memory GiB", "time", "command")
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--json`."""
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the GPUs, and what runs on them."""
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
    """The library of the driver, started; what it raises inside becomes a message."""
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
    """What uses a GPU. None is what the system does not tell, such as a process of another container.

    Attributes:
        pid: as the driver numbers processes: outside of containers.
        kind: 'compute' or 'graphics'.
        user, command: whose it is, and what.
        memory_bytes: of the GPU.
        seconds: since it was started.
    """

    pid: int
    kind: str
    user: str | None
    command: str | None
    memory_bytes: int | None
    seconds: float | None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one that MIG has cut off. None is what it does not tell.

    Attributes:
        index: as nvidia-smi numbers it, by its place on the PCI bus; of a part, GPU and part: '0:1'.
        uuid: which stays, whatever the order.
        cuda: what it is called in a program that is started from this shell, such as 'cuda:0'.
        memory_used_bytes: by everybody, the driver too.
        utilization_percent: share of the last moments in which something ran, maybe on a small part of it.
        processes: that use it; None where the driver does not tell.
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
    """All GPUs, each before its parts.

    Args:
        nvml: the module pynvml, started.
        uuids: of the devices that CUDA shows, in its order.
    """
    for index in range(nvml.nvmlDeviceGetCount()):
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        yield _gpu(nvml, device, str(index), uuids)
        mode = _asked(nvml, "nvmlDeviceGetMigMode", device)
        if mode is None or not mode[0]:
            continue
        for number in range(_asked(nvml, "nvmlDeviceGetMaxMigDeviceCount", device) or 0):
            part = _asked(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", device, number)
            if part is not None:
                yield _gpu(nvml, part, f"{index}:{number}", uuids)


def _gpu(nvml: Any, device: Any, index: str, uuids: list[str]) -> Gpu:
    uuid = _asked(nvml, "nvmlDeviceGetUUID", device)
    memory = _asked(nvml, "nvmlDeviceGetMemoryInfo", device)
    rates = _asked(nvml, "nvmlDeviceGetUtilizationRates", device)
    power = _asked(nvml, "nvmlDeviceGetPowerUsage", device)  # mW
    bare = (uuid or "").partition("-")[2]
    return Gpu(
        index=index,
        uuid=uuid,
        name=_asked(nvml, "nvmlDeviceGetName", device),
        cuda=f"cuda:{uuids.index(bare)}" if bare in uuids else None,
        memory_used_bytes=None if memory is None else memory.used,
        memory_total_bytes=None if memory is None else memory.total,
        utilization_percent=None if rates is None else rates.gpu,
        temperature_celsius=_asked(nvml, "nvmlDeviceGetTemperature", device, 0),
        power_watts=None if power is None else power / 1000,
        processes=_processes(nvml, device),
    )


def _asked(nvml: Any, function: str, *arguments: Any) -> Any:
    """What a function of the driver says; None where it cannot: another version, part of a GPU, no right."""
    call = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        return call(*arguments)
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError):
        return None


def _processes(nvml: Any, device: Any) -> tuple[Process, ...] | None:
    kinds = {
        "compute": _asked(nvml, "nvmlDeviceGetComputeRunningProcesses", device),
        "graphics": _asked(nvml, "nvmlDeviceGetGraphicsRunningProcesses", device),
    }
    if kinds["compute"] is None:
        return None
    return tuple(
        Process(found.pid, kind, *_who(found.pid), found.usedGpuMemory, _age(found.pid))
        for kind, listed in kinds.items()
        for found in listed or []
    )


def _who(pid: int, proc: Path = Path("/proc")) -> tuple[str | None, str | None]:
    """User and command line of a process, as far as /proc shows those of others."""
    found = re.search(r"^Uid:\s+(\d+)", _read(proc / str(pid) / "status"), re.MULTILINE)
    if found is None:
        return None, None
    uid = int(found[1])
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
    except OSError:  # it has ended, it is not for us to read, or there is no /proc
        return ""


def _print(report: dict[str, Any]) -> None:
    rows = report["gpus"]
    print(f"driver {report['driver']}, for CUDA up to {report['cuda_of_driver']}")
    for name, value in report["environment"].items():
        if value is not None:
            print(f"{name}={value}")
    print_table(_GPU, map(_cells, rows))
    print()
    processes = [(gpu["index"], process) for gpu in rows for process in gpu["processes"] or ()]
    if processes:
        print_table(_PROCESS, (_process_cells(*row) for row in processes), right=("pid",))
    else:
        print("no process that is visible from here uses a GPU")
    for gpu in rows:
        used = gpu["memory_used_bytes"] or 0
        if gpu["processes"] is None:
            print(f"GPU {gpu['index']}: the driver does not tell which processes use it")
        elif not gpu["processes"] and used > _UNSEEN and not _has_parts(gpu, rows):
            print(
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
