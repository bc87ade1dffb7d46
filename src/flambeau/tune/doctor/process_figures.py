"""Memory and CPU time of processes, as /proc tells them."""

import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def resident_bytes(processes: list[int]) -> int:
    """Memory that they hold together; pages that several share count for each."""
    total = 0
    for process in processes:
        with suppress(OSError, ValueError, IndexError):
            total += int((_PROC / f"{process}" / "statm").read_text().split()[1])
    return total * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(processes: list[int]) -> int:
    """Memory that they hold together; of a page that several share each counts its part. It takes a while."""
    total = 0
    for process in processes:
        with suppress(OSError, ValueError, IndexError):
            for line in (_PROC / f"{process}" / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


def cpu_seconds(processes: list[int]) -> dict[int, float]:
    """By process the CPU time that it has used."""
    found = {}
    for process in processes:
        with suppress(OSError, ValueError, IndexError):
            # Behind the name, which may hold anything and ends with the last parenthesis.
            fields = (_PROC / f"{process}" / "stat").read_text().rpartition(")")[2].split()
            found[process] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def machine_cpu_seconds() -> tuple[float, int]:
    """CPU time that all processes of the machine have used, and of how many CPUs that is; 0 CPUs: unknown."""
    try:
        lines = (_PROC / "stat").read_text().splitlines()
    except OSError:
        return 0.0, 0
    fields = [int(field) for field in lines[0].split()[1:9]]
    cpus = sum(line.startswith("cpu") for line in lines) - 1
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), cpus
