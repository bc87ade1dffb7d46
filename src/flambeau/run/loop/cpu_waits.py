"""Whether torch's threads wait for a CPU that others use, and what one thread alone would gain.

OpenMP's threads meet at the end of each operation, spinning: where one of them has no CPU, all others wait.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

import torch

from flambeau.parallel.ranks import local_world
from flambeau.recipes.setup.environment import usable_cpus
from flambeau.run.options.portable_bits import fixes_threads

_PROC = Path("/proc")
_TRIAL_S = 1.0
_SLOT_S = 0.1  # on each number of threads in turn; some slices of the kernel's scheduler
_WAITS = 0.2  # share of the time, below which a machine counts as free; chosen
_FASTER = 1.3  # times, below which one thread is not worth a restart; chosen
_BUSY = 0.25  # CPUs that other programs use, below which they are not named; chosen, as in doctor


class CpuWaits:
    """Time that threads of this process were ready to run, and no CPU was free."""

    def __init__(self) -> None:
        self._then = _waited_s()
        self._began = time.perf_counter()
        self._busy_then = _busy_s()
        self._own_then = _own_s()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def share(self) -> float:
        """The longest-waiting thread's part of the time, 0 to 1; 0 if unknown."""
        most = max(
            (seconds - self._then.get(task, 0.0) for task, seconds in _waited_s().items()),
            default=0.0,
        )
        return min(1.0, most / self.seconds) if self.seconds > 0 else 0.0

    def others_cpus(self) -> float | None:
        """How many CPUs other programs kept busy; None where unknown.

        None of several processes knows what the others used; where a process may use only some CPUs, programs
        may run on the rest.
        """
        now = _busy_s()
        if now is None or self._busy_then is None:
            return None
        if local_world() > 1 or usable_cpus() != os.cpu_count() or self.seconds <= 0:
            return None
        own = _own_s() - self._own_then
        return max(0.0, now - self._busy_then - own) / self.seconds


def _waited_s() -> dict[str, float]:
    """Seconds on a run queue by thread: the second number of schedstat (proc(5), in nanoseconds)."""
    waited = {}
    for file in _PROC.glob("self/task/*/schedstat"):
        try:
            waited[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # it has ended, or nothing is counted
            continue
    return waited


def _busy_s() -> float | None:
    """CPU seconds that all processes of the machine have used; None where nothing counts them."""
    try:
        fields = (_PROC / "stat").read_text().splitlines()[0].split()[1:9]
        user, nice, system, _idle, _waits, *rest = map(int, fields)
    except (OSError, ValueError, IndexError):
        return None
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """CPU seconds of this process, and of its children and theirs: the workers of its loaders."""
    seconds = sum(os.times()[:4])
    parents = ["self"]
    while parents:
        for file in _PROC.glob(f"{parents.pop()}/task/*/children"):
            with suppress(OSError):  # it has ended
                children = file.read_text().split()
                parents += children
                seconds += sum(map(_used_s, children))
    return seconds


def _used_s(process: str) -> float:
    """CPU seconds of a process and of its children that have ended (fields 14 to 17 of stat in proc(5))."""
    with suppress(OSError, ValueError, IndexError):
        # Fields after the name, which may hold anything and ends with the last parenthesis.
        fields = (_PROC / process / "stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def speed_of_one_thread() -> float:
    """How many times as fast as with all of torch's threads a convolution is with one, right now.

    Both run in turn for a second, and their number counts, not the median time: a thread that loses its CPU
    holds up a few for long. The number of threads is restored, and nothing random is drawn.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return 1.0
    images, weights = torch.ones(32, 16, 32, 32), torch.ones(16, 16, 3, 3)
    counts = {1: 0, threads: 0}
    seconds = {1: 0.0, threads: 0.0}
    until = time.perf_counter() + _TRIAL_S
    try:
        with torch.inference_mode():
            while time.perf_counter() < until:
                for number in counts:
                    torch.set_num_threads(number)
                    start = time.perf_counter()
                    while (elapsed := time.perf_counter() - start) < _SLOT_S:
                        torch.nn.functional.conv2d(images, weights, padding=1)
                        counts[number] += 1
                    seconds[number] += elapsed
    finally:
        torch.set_num_threads(threads)
    return (counts[1] / seconds[1]) / (counts[threads] / seconds[threads])


def wait_remark(waits: CpuWaits) -> str | None:
    """What a user should know of the waits so far, if anything."""
    share = waits.share()
    if share < _WAITS:
        return None
    others = waits.others_cpus()
    threads = torch.get_num_threads()
    processes = local_world()
    cpus = usable_cpus()
    said = f"threads of this process wait {share:.0%} of the time for a CPU"
    if others is not None and others >= _BUSY:
        said += f", while other programs keep {others:.1f} CPUs busy"
    fitting = max(1, cpus // processes)
    if threads > fitting:
        each = f" in each of {processes} processes" if processes > 1 else ""
        return (
            f"{said}: torch computes with {threads} threads{each}, and {cpus} CPU{'s' * (cpus > 1)} may be "
            f"used; {_with_threads(fitting)}"
        )
    faster = speed_of_one_thread()
    if faster >= _FASTER:
        return (
            f"{said}, and one thread is {faster:.1f} times as fast as {threads} in a trial just now; "
            f"{_with_threads(1)}"
        )
    return said if others is None or others >= _BUSY else None


def _with_threads(number: int) -> str:
    """How to compute with so many threads."""
    if fixes_threads():  # OMP_NUM_THREADS has no effect then
        return (
            f"--portable-bits {number} in a new run computes with {number}, and gives its own bits"
        )
    those = f"{number} thread{'s' * (number > 1)}"
    return f"put OMP_NUM_THREADS={number} in front of the command (bits are then those of {those})"
