"""Whether torch's threads wait for a CPU that others use, and what one thread alone would gain.

OpenMP's threads meet at the end of each operation, spinning: where one of them has no CPU, all others wait.
"""

import statistics
import time
from pathlib import Path

import torch

_TASKS = Path("/proc/self/task")
_ROUNDS = 7
_ENOUGH_S = 0.5  # of a trial; chosen
_WAITS = 0.2  # share of the time, below which a machine counts as free; chosen
_FASTER = 1.3  # times, below which one thread is not worth a restart; chosen


class CpuWaits:
    """Time that threads of this process were ready to run, and no CPU was free, since this was made."""

    def __init__(self) -> None:
        self._then = _waited_s()
        self._began = time.perf_counter()

    def share(self) -> float:
        """The part of the time of the thread that has waited longest, 0 to 1; 0 where nothing counts it."""
        elapsed = time.perf_counter() - self._began
        most = max(
            (seconds - self._then.get(task, 0.0) for task, seconds in _waited_s().items()),
            default=0.0,
        )
        return min(1.0, most / elapsed) if elapsed > 0 else 0.0


def _waited_s() -> dict[str, float]:
    """Seconds on a run queue by thread: the second number of schedstat (proc(5), in nanoseconds)."""
    waited = {}
    for file in _TASKS.glob("*/schedstat"):
        try:
            waited[file.parent.name] = int(file.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # it has ended, or nothing is counted
            continue
    return waited


def speed_of_one_thread() -> float:
    """How many times as fast as with all of torch's threads a small convolution is with one, right now.

    Measured in turn for at most half a second; the number of threads is the same afterwards, and nothing
    random is drawn.
    """
    threads = torch.get_num_threads()
    if threads == 1:
        return 1.0
    images, weights = torch.ones(8, 16, 32, 32), torch.ones(16, 16, 3, 3)
    times: dict[int, list[float]] = {1: [], threads: []}
    until = time.perf_counter() + _ENOUGH_S
    try:
        with torch.inference_mode():
            for _ in range(_ROUNDS):
                for number, seconds in times.items():
                    torch.set_num_threads(number)
                    start = time.perf_counter()
                    for _ in range(4):
                        torch.nn.functional.conv2d(images, weights, padding=1)
                    seconds.append(time.perf_counter() - start)
                if time.perf_counter() > until:
                    break
    finally:
        torch.set_num_threads(threads)
    return statistics.median(times[threads]) / statistics.median(times[1])


def wait_remark(waits: CpuWaits) -> str | None:
    """What a user should know of the waits so far; None where there is nothing to say."""
    share = waits.share()
    threads = torch.get_num_threads()
    if share < _WAITS:
        return None
    faster = speed_of_one_thread()
    if faster < _FASTER:
        return None
    return (
        f"threads of this process wait {share:.0%} of it for a CPU, which others use, and one thread is "
        f"{faster:.1f} times as fast as {threads} in a trial just now; put OMP_NUM_THREADS=1 in front of the "
        "command (bits are then those of one thread)"
    )
