"""Lets torch's threads sleep, and not spin, where other programs use the processors."""

import os
from collections.abc import MutableMapping
from pathlib import Path

_LOAD = Path("/proc/loadavg")
_PRESSURE = Path("/proc/pressure/cpu")
_CHOSEN_BY_USER = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"
_BUSY_LOAD = 0.75  # runnable threads per processor, in the mean of a minute; chosen
_BUSY_WAITS = 20.0  # percent of ten seconds in which something waited for a processor; chosen


def sleep_if_busy(
    environment: MutableMapping[str, str], *, load: Path = _LOAD, pressure: Path = _PRESSURE
) -> None:
    """Set OMP_WAIT_POLICY, which OpenMP reads when torch is loaded, unless the user has chosen how to wait.

    Threads that wait for each other spin for milliseconds, in which another one could compute where all
    processors are taken: asleep, an epoch of the embedded data took 0.30 of the time on two busy cores
    (median of 5 rounds, 0.23 to 0.54). On free processors spinning is faster, and stays. No result depends
    on it.

    Args:
        load, pressure: files of Linux (proc(5), PSI); without them nothing is set.
    """
    if not environment.keys().isdisjoint(_CHOSEN_BY_USER):
        return
    if _load_per_cpu(load) >= _BUSY_LOAD and _waits(pressure) >= _BUSY_WAITS:
        environment["OMP_WAIT_POLICY"] = "passive"


def _load_per_cpu(file: Path) -> float:
    try:
        return float(file.read_text(encoding="ascii").split()[0]) / (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return 0.0


def _waits(file: Path) -> float:
    """`some avg10`, in percent."""
    try:
        words = file.read_text(encoding="ascii").split()
        return float(words[1].removeprefix("avg10=")) if words[0] == "some" else 0.0
    except (OSError, ValueError, IndexError):
        return 0.0
