"""The operations of a few steps, from torch's profiler: small ones, memory-bound ones, GPU kernels."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_STEPS = 3
_SMALL_US = 20.0  # a shorter operation is mostly Python and dispatch; chosen
# Operations bound by memory: elementwise ones and reductions.
_MEMORY_BOUND = (
    "batch_norm", "layer_norm", "group_norm", "aten::add", "aten::mul", "aten::div", "aten::sub", "relu",
    "gelu", "silu", "sigmoid", "tanh", "threshold", "dropout", "softmax", "max_pool", "avg_pool",
    "aten::copy_", "aten::fill_", "aten::sum", "aten::mean", "aten::cat",
)  # fmt: skip
# What runs on a GPU and computes nothing: copies from and to the host, and NCCL, which also waits.
_NO_COMPUTING = ("Memcpy HtoD", "Memcpy DtoH", "nccl")
# Kernels of torch.compile: elementwise ones and reductions.
_BOUND_KERNELS = ("triton_poi", "triton_red", "triton_per")


class Operations:
    """Profiles a few steps; does nothing if the script already runs a profiler."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._left = _STEPS

    def start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(activities=activities, acc_events=True)
        with suppress(RuntimeError):  # another profiler is running
            profiler.start()
            self._profile = profiler

    def count_step(self) -> bool:
        """Count a step; whether to profile another one."""
        self._left -= 1
        return self._profile is not None and self._left > 0

    def result(self, trace: str | None) -> dict[str, Any]:
        """Figures per step: operations of the CPU, and the share of the time that a GPU computes."""
        if self._profile is None:
            return {"has_other_profiler": True}
        profiler = self._profile
        profiler.stop()
        events = [
            event
            for event in profiler.events()
            if event.device_type.name == "CPU" and event.name.startswith("aten::")
        ]
        times: dict[str, list[float]] = defaultdict(list)
        for event in events:
            times[event.name].append(event.self_cpu_time_total)
        per_step = {name: undisturbed(each, _STEPS) for name, each in times.items()}
        on_device = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type.name != "CPU" and not event.is_user_annotation
        ]
        computing = [one for one in on_device if not one[0].startswith(_NO_COMPUTING)]
        if trace is not None:
            profiler.export_chrome_trace(trace)  # compressed where it ends in .gz

        def seconds(names: Iterable[str]) -> float:
            return sum(sum(per_step[name]) for name in names) / 1e6

        small = [n for n, each in per_step.items() if sum(each) < _SMALL_US * len(each)]
        return {
            "count": len(events) / _STEPS,
            "seconds": seconds(per_step),
            "small_s": seconds(small),
            "memory_bound": _bound_on_device(events, computing)
            if computing
            else (seconds(filter(_is_bound, per_step)) / max(seconds(per_step), 1e-9)),
            "device_s": covered(one[1:] for one in computing) / 1e6 / _STEPS,
            "active_s": covered(one[1:] for one in on_device) / 1e6 / _STEPS,
        }


def _is_bound(operation: str) -> bool:
    return any(part in operation for part in _MEMORY_BOUND)


def _bound_on_device(events: Iterable[Any], computing: Sequence[tuple[str, float, float]]) -> float:
    """The share of a GPU's computing time that moves bytes: in eager and in compiled kernels."""
    kernels = [kernel for event in events if _is_bound(event.name) for kernel in event.kernels]
    bound: float = sum(one.duration for one in kernels if not one.name.startswith(_NO_COMPUTING))
    bound += sum(end - start for name, start, end in computing if name.startswith(_BOUND_KERNELS))
    total = sum(end - start for _, start, end in computing)
    return min(1.0, bound / max(total, 1e-9))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals in any order, as streams of a device compute at the same time."""
    total = 0.0
    reached = float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def undisturbed(times: Sequence[float], steps: int) -> list[float]:
    """Times of an operation's calls in a single step, from those in several equal steps, in order.

    Each counts with its minimum: without the CPU, a call of a microsecond takes milliseconds. If steps
    differ, with the mean of all.
    """
    calls, left = divmod(len(times), steps)
    if left:
        return [sum(times) / len(times)] * max(1, round(len(times) / steps))
    return [min(times[number::calls]) for number in range(calls)]
