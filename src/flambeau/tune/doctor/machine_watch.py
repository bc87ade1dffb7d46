"""Which resources of the machine run short while a script runs: memory, shared memory, the CPU quota."""

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from flambeau.recipes.setup.environment import usable_cpus, usable_memory
from flambeau.sandbox.trial_processes import processes_of
from flambeau.tune.doctor.connections import outside_connections

BUSY = 0.25
"""CPUs that other programs keep busy before figures are called noisy; chosen."""
_MOST = 0.95  # share of the memory above which a trial is ended; chosen
_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")
_QUOTA_FILES = (
    (Path("/sys/fs/cgroup/cpu.stat"), "throttled_usec", 1e6),
    (Path("/sys/fs/cgroup/cpu/cpu.stat"), "throttled_time", 1e9),
)


@dataclass
class MachineWatch:
    """State of the machine during a trial, updated by `poll`.

    Attributes:
        is_out_of_memory: the kernel is about to kill a process.
        shared_share: peak share of /dev/shm in use.
        throttled_share: of the time, without CPU quota left.
    """

    folder: Path
    most_bytes: int = 0
    limit_bytes: int = 0
    is_out_of_memory: bool = False
    shared_share: float = 0.0
    throttled_share: float = 0.0
    others_cpus: float = 0.0
    peers: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._throttled = throttled_seconds()
        self.limit_bytes = usable_memory() or 0
        self._busy_then, self._cpus = machine_cpu_seconds()
        self._cpu_seconds: dict[int, float] = {}

    def poll(self) -> None:
        processes = list(processes_of(self.folder))
        self.peers |= outside_connections(processes)
        held = resident_bytes(processes)
        self.most_bytes = max(self.most_bytes, held)
        most = _MOST * self.limit_bytes
        if most and held > most and proportional_bytes(processes) > most:
            self.is_out_of_memory = True
        self._cpu_seconds |= cpu_seconds(processes)
        if _SHARED_MEMORY.is_dir():
            usage = shutil.disk_usage(_SHARED_MEMORY)
            if usage.total:
                self.shared_share = max(self.shared_share, usage.used / usage.total)
        elapsed = time.monotonic() - self._began
        if elapsed > 0:
            self.throttled_share = (throttled_seconds() - self._throttled) / elapsed
            # With fewer usable CPUs, the others may run in containers on the remaining ones.
            if self._cpus == usable_cpus():
                busy_s = machine_cpu_seconds()[0] - self._busy_then
                self.others_cpus = max(0.0, busy_s - sum(self._cpu_seconds.values())) / elapsed


def busy_cpus(seconds: float) -> float:
    """How many CPUs of the machine are busy, while this process only waits."""
    began = machine_cpu_seconds()[0]
    time.sleep(seconds)
    return (machine_cpu_seconds()[0] - began) / seconds


def throttled_seconds() -> float:
    """How long this container was ever kept from its CPUs; 0 if nothing counts it."""
    for file, name, unit in _QUOTA_FILES:
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith(f"{name} "):
                return int(line.split()[1]) / unit
    return 0.0


def resident_bytes(processes: list[int]) -> int:
    """Memory of these processes together; a page that several share counts for each."""
    total = 0
    for process in processes:
        with suppress(OSError, ValueError, IndexError):
            total += int((_PROC / f"{process}" / "statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(processes: list[int]) -> int:
    """Memory of these processes, shared pages by parts. Slow: reads all mappings."""
    total = 0
    for process in processes:
        with suppress(OSError, ValueError, IndexError):
            for line in (_PROC / f"{process}" / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


def cpu_seconds(processes: list[int]) -> dict[int, float]:
    used = {}
    for process in processes:
        with suppress(OSError, ValueError, IndexError):
            # Fields after the name, which may hold anything and ends with the last parenthesis.
            fields = (_PROC / f"{process}" / "stat").read_text().rpartition(")")[2].split()
            used[process] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


def machine_cpu_seconds() -> tuple[float, int]:
    """CPU time that all processes of the machine have used, and the number of its CPUs; 0 CPUs: unknown."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
    except OSError:
        return 0.0, 0
    fields = [int(field) for field in lines[0].split()[1:9]]
    cpus = sum(line.startswith("cpu") for line in lines) - 1
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), cpus
