"""Where time and memory of a training step go: parts, operations, modules, Python, data.

Three separate passes: a clock alone, `torch.profiler`, `cProfile`.
"""

import contextlib
import cProfile
import gzip
import pstats
import statistics
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from flambeau.inspection.watched_forward import hooked
from flambeau.tune.step.step_memory import BACKWARD, MODULE, StepMemory, chrome_trace, memory_of
from flambeau.tune.step.training_steps import WAIT, Steps, no_part

_WARM_UP = 3  # steps that do not count; chosen
_STEPS = 20  # timed at most
_ENOUGH_S = 10.0  # of timed steps; at least two are made
_OF_THE_PROFILER = "Activity Buffer Request"  # has a time on the device, too
_TRACED = 3  # steps under torch.profiler: each has thousands of operations


@dataclass(frozen=True)
class PartTime:
    """Seconds: the median and the quartiles."""

    name: str
    median_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True)
class OperationTime:
    """An operation of torch without those that it calls: seconds and calls per step, share of all."""

    name: str
    self_s: float
    share: float
    calls: float


@dataclass(frozen=True)
class ModuleTime:
    """A module without the modules in it: seconds per step."""

    name: str
    kind: str
    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class FunctionTime:
    """A Python function without what it calls: seconds and calls per step."""

    name: str
    file: str
    line: int
    self_s: float
    calls: float


@dataclass(frozen=True)
class StepProfile:
    """The result of `profile_steps`, each list by time.

    Attributes:
        operations: on a GPU by their kernels' time.
        python_s: seconds of Python functions per step, slowed down by cProfile.
        read_s: seconds per batch of the data alone; None without data.
        memory: at the peak; None if torch reports none of the device.
    """

    steps: int
    step: PartTime
    parts: tuple[PartTime, ...]
    operations: tuple[OperationTime, ...]
    modules: tuple[ModuleTime, ...]
    functions: tuple[FunctionTime, ...]
    python_s: float
    read_s: float | None
    memory: StepMemory | None

    @property
    def waits_s(self) -> float:
        return sum(part.median_s for part in self.parts if part.name == WAIT)


def profile_steps(steps: Steps, *, trace: Path | None = None) -> StepProfile:
    """Measure steps, after some to warm up; `trace` is a file for ui.perfetto.dev, compressed if a .gz."""
    for _ in range(_WARM_UP):
        steps.step(no_part)
    whole, parts = _timed(steps)
    profiler = traced(steps, _TRACED)
    time_line = chrome_trace(profiler)
    if trace is not None:
        trace.write_bytes(gzip.compress(time_line, 6) if trace.suffix == ".gz" else time_line)
    on_device = len(_activities(steps.device)) > 1
    functions, python_s = _python(steps)
    read_s = None if steps.read is None else read_seconds(steps.read(None))
    return StepProfile(
        steps=len(whole),
        step=summary("step", whole),
        parts=tuple(summary(name, seconds) for name, seconds in parts.items()),
        operations=_operations(profiler, on_device=on_device),
        modules=_modules(steps, profiler, on_device=on_device),
        functions=functions,
        python_s=python_s,
        read_s=read_s,
        memory=memory_of(time_line, steps),
    )


def summary(name: str, seconds: Sequence[float]) -> PartTime:
    """Median and quartiles of at least two values."""
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return PartTime(name, median, low, high)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _timed(steps: Steps) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds of whole steps and of their parts; the device is synchronized after each part."""
    parts: dict[str, list[float]] = defaultdict(list)
    whole: list[float] = []

    @contextlib.contextmanager
    def part(name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        synchronize(steps.device)
        parts[name].append(time.perf_counter() - start)

    synchronize(steps.device)
    while len(whole) < 2 or (len(whole) < _STEPS and sum(whole) < _ENOUGH_S):
        start = time.perf_counter()
        steps.step(part)
        whole.append(time.perf_counter() - start)
    return whole, parts


# ---------------------------------------------------------------- torch.profiler


def traced(steps: Steps, count: int) -> profile:
    """Steps under torch's profiler, with modules as ranges, and the allocator."""
    profiler = profile(activities=_activities(steps.device), profile_memory=True, acc_events=True)
    with _modules_recorded(steps.model), profiler:
        for number in range(count):
            with record_function(f"step {number}"):
                steps.step(record_function)
            synchronize(steps.device)
    return profiler


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """What torch's profiler can record: on devices other than these only the CPU's part."""
    activities = [ProfilerActivity.CPU]
    if device.type in ("cuda", "xpu"):
        activities.append(getattr(ProfilerActivity, device.type.upper()))
    return activities


def _operations(profiler: profile, *, on_device: bool) -> tuple[OperationTime, ...]:
    rows = [
        (row.key, row.self_device_time_total if on_device else row.self_cpu_time_total, row.count)
        for row in profiler.key_averages()
        if row.device_type.name == "CPU" and not row.is_user_annotation
    ]
    all_us = sum(time_us for _, time_us, _ in rows) or 1.0
    operations = [
        OperationTime(name, time_us / 1e6 / _TRACED, time_us / all_us, count / _TRACED)
        for name, time_us, count in rows
        if time_us > 0 and name != _OF_THE_PROFILER
    ]
    return tuple(sorted(operations, key=lambda one: -one.self_s))


@contextlib.contextmanager
def _modules_recorded(model: nn.Module) -> Iterator[None]:
    names = {module: name for name, module in model.named_modules()}
    open_: list[Any] = []

    def before(module: nn.Module, *_: Any) -> None:
        open_.append(record_function(MODULE + names[module]))
        open_[-1].__enter__()

    def after(*_: Any) -> None:
        open_.pop().__exit__(None, None, None)

    with hooked(model, before, after):
        yield


def _modules(steps: Steps, profiler: profile, *, on_device: bool) -> tuple[ModuleTime, ...]:
    """Forward from the ranges; backward by the sequence number, which an operation and its gradient share."""
    # The device's rows repeat the times of the operations that started its kernels.
    events = [e for e in profiler.events() or [] if e.device_type.name == "CPU"]
    forward: dict[str, float] = defaultdict(float)
    backward: dict[str, float] = defaultdict(float)
    owners: dict[int, str] = {}
    for event in sorted(events, key=lambda one: one.time_range.start):
        us = event.device_time_total if on_device else event.time_range.elapsed_us()
        around = _around(event)
        if event.name.startswith(MODULE):
            forward[event.name] += us
            if around.startswith(MODULE):
                forward[around] -= us
        elif event.name.startswith(BACKWARD):
            if (owner := owners.get(event.sequence_nr, "")).startswith(MODULE):
                backward[owner] += us
        elif event.sequence_nr >= 0 and not around.startswith(BACKWARD):
            # Operations without gradient have the number of the next one, which overwrites it.
            owners[event.sequence_nr] = around
    kinds = {MODULE + name: type(module).__name__ for name, module in steps.model.named_modules()}
    modules = [
        ModuleTime(
            name.removeprefix(MODULE),
            kinds.get(name, ""),
            max(0.0, forward[name]) / 1e6 / _TRACED,
            backward[name] / 1e6 / _TRACED,
        )
        for name in forward
    ]
    return tuple(sorted(modules, key=lambda one: -one.total_s))


def _around(event: FunctionEvent) -> str:
    """The module, or the node of the backward pass, around an event; '' if none."""
    outer = event.cpu_parent
    while outer is not None:
        if outer.name.startswith((MODULE, BACKWARD)):
            return str(outer.name)
        outer = outer.cpu_parent
    return ""


# ---------------------------------------------------------------- Python and data


def _python(steps: Steps) -> tuple[tuple[FunctionTime, ...], float]:
    """Functions written in Python, without what they call in C, such as torch's operations."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        for _ in range(_TRACED):
            steps.step(no_part)
    finally:
        profiler.disable()
    stats: dict[tuple[str, int, str], tuple[int, int, float, float, Any]]
    stats = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    functions = [
        FunctionTime(name, file, line, self_s / _TRACED, calls / _TRACED)
        for (file, line, name), (_, calls, self_s, _, _) in stats.items()
        if file != "~"
    ]
    functions.sort(key=lambda one: -one.self_s)
    return tuple(functions), sum(one.self_s for one in functions)


def read_seconds(batches: Generator[Any], *, enough_s: float = _ENOUGH_S) -> float:
    """Seconds per batch while nothing computes, not counting the first one, which starts the workers."""
    with contextlib.closing(batches):
        next(batches)
        count = 0
        start = time.perf_counter()
        while count < 2 or (count < _STEPS and time.perf_counter() - start < enough_s):
            next(batches)
            count += 1
        return (time.perf_counter() - start) / count
