"""Times the steps of a training from inside its process, for bench/throughput_contenders.py.

Nothing waits for the GPU between the first and the last step of the time that counts: the ends of its windows
are CUDA events.
"""

import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MIN_WINDOWS = 4
PROFILED_STEPS = 5


@dataclass(frozen=True)
class Plan:
    """What is to be timed.

    Attributes:
        seconds: the time that counts.
        warmup_steps: before it.
        burst: a window has a multiple of so many steps; loader workers deliver that many at once.
        profile: find by torch.profiler, afterwards, in what share of the time kernels run.
    """

    batch: int
    seconds: float
    warmup_steps: int
    burst: int
    profile: bool


class Meter:
    """Call `step` once per step; when all is timed, it writes its figures to a file and ends the process.

    Ending it there is the same for all: no trainer gets to write, evaluate or wind up, and none has to be
    told how many steps there will be.
    """

    def __init__(self, plan: Plan, device: torch.device, out: Path, started: float) -> None:
        self._plan, self._device, self._out, self._started = plan, device, out, started
        self._steps = 0
        self._halfway = self._first_step = self._begin = self._cpu = 0.0
        self._stride = 1
        self._marks: list[torch.cuda.Event | float] = []
        self._profiler: Any = None
        self._profile_end = 0
        self._figures: dict[str, Any] = {}
        self._next: Callable[[], None] = self._warm

    def step(self) -> None:
        self._steps += 1
        self._next()

    def _warm(self) -> None:
        warm = self._plan.warmup_steps
        if self._steps == 1:
            self._wait()
            self._first_step = time.monotonic()
        if self._steps == max(1, warm // 2):
            self._wait()
            self._halfway = time.monotonic()
        if self._steps >= max(2, warm):
            self._start()

    def _start(self) -> None:
        self._wait()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self._cpu = session_cpu_seconds()
        self._begin = time.monotonic()
        step_s = (self._begin - self._halfway) / (
            self._steps - max(1, self._plan.warmup_steps // 2)
        )
        burst = self._plan.burst
        steps = self._plan.seconds / (2 * MIN_WINDOWS) / max(step_s, 1e-6)
        self._stride = burst * max(1, round(steps / burst))
        self._steps = 0
        self._next = self._measure
        self._mark()

    def _measure(self) -> None:
        if self._steps % self._stride:
            return
        self._mark()
        passed = time.monotonic() - self._begin
        windows = len(self._marks) - 1
        if passed >= self._plan.seconds and (
            windows >= MIN_WINDOWS or passed >= 2 * self._plan.seconds
        ):
            self._end()

    def _mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _end(self) -> None:
        self._wait()
        end = time.monotonic()
        cpu = session_cpu_seconds() - self._cpu
        seconds = [_between(a, b) for a, b in zip(self._marks, self._marks[1:], strict=False)]
        self._figures = {
            "window_rates": [self._stride * self._plan.batch / s for s in seconds],
            "mean_rate": self._steps * self._plan.batch / sum(seconds),
            "steps": self._steps,
            "begin": self._begin,
            "end": end,
            "cores": cpu / (end - self._begin),
            "peak_memory": self._peak(),
            "first_step_s": self._first_step - self._started,
            "warmup_s": self._begin - self._first_step,
        }
        self._write()  # first, in case the profiler fails
        if self._device.type != "cuda" or not self._plan.profile:
            os._exit(0)  # workers die with the session, which the bench ends
        self._begin_profile()

    def _begin_profile(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._profiler.__enter__()
        self._profile_end = self._steps + PROFILED_STEPS
        self._next = self._profile

    def _profile(self) -> None:
        if self._steps < self._profile_end:
            return
        self._wait()
        self._profiler.__exit__(None, None, None)
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in self._profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not getattr(event, "is_user_annotation", False)
        ]
        self._figures["busy_by_profiler"] = covered_share(spans)
        self._write()
        os._exit(0)

    def _write(self) -> None:
        whole = self._out.with_suffix(".part")
        whole.write_text(json.dumps(self._figures), encoding="utf-8")
        whole.replace(self._out)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _peak(self) -> int:
        """Bytes: of tensors on the GPU since the warm-up, or of this process."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _between(a: "torch.cuda.Event | float", b: "torch.cuda.Event | float") -> float:
    if isinstance(a, float) or isinstance(b, float):
        return float(b) - float(a)
    return a.elapsed_time(b) / 1e3


def covered_share(spans: list[tuple[float, float]]) -> float | None:
    """The share of the time from the first start to the last end that intervals cover; None without any."""
    if not spans:
        return None
    covered = 0.0
    reached = min(spans)[0]
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered / (reached - min(spans)[0])


def session_cpu_seconds() -> float:
    """Processor time of all processes of this session, those included that have ended and were waited for."""
    own = os.getsid(0)
    ticks = 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            text = (folder / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # it has ended
        fields = text.rpartition(")")[2].split()
        if int(fields[3]) == own:
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
