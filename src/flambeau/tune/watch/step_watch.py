"""Counts the steps of a process that trains: a window in which they are timed, then some to inspect."""

import atexit
import itertools
import math
import os
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from flambeau.tune.watch.interrupt_sampler import InterruptSampler, sampler_of
from flambeau.tune.watch.loader_clock import LoaderClock
from flambeau.tune.watch.operations import Operations
from flambeau.tune.watch.plan import Plan, write_whole
from flambeau.tune.watch.ptrace_permission import SHORT, STACKS_READ, is_read_from_outside, wait_for
from flambeau.tune.watch.stack_phases import CodeLocation, note_training
from flambeau.tune.watch.stack_sampler import StackSample, StackSampler
from flambeau.tune.watch.thread_state import page_faults, run_times
from flambeau.tune.watch.waiting_calls import WaitingCalls

_WAITS_STEPS = 5  # steps whose waiting calls are counted; chosen
_WAITS_S = 3.0  # but at most so many seconds of them
_SLICE_S, _PAUSE_S = 0.5, 2.0  # short steps are watched in slices with pauses; chosen
_PAUSE_BATCHES = 100  # batches between checks whether a pause is over; chosen
_LONGER = 2  # times the seconds of the window with pauses, for as many samples; chosen


class StepWatch:
    """Counts the steps of the first optimizer that makes one; gradient accumulation is part of a step.

    The stages, each begun by a step: warm-up, window, waiting calls, operations, over. Of very short steps a
    fifth is watched, in slices of a twice as long window: hook, clock and samples cost about 5 us per step. A
    file exists in the trial's folder while the window is open.
    """

    def __init__(
        self, folder: Path, plan: Plan, loaders: LoaderClock, on_first_step: Callable[[], None]
    ) -> None:
        self._folder, self._plan, self.loaders = folder, plan, loaders
        self._on_first_step = on_first_step
        self._pid = os.getpid()
        self._made = time.perf_counter()
        self._reset()

    def _reset(self) -> None:
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._stage: Callable[[float], None] = self._warm_up
        self._count, self._began, self._opened = 0, 0.0, 0.0
        self._times: list[float] = []  # of the current slice; the first is its beginning
        self._slices: list[list[float]] = []
        self._timed, self._end = 0, 0.0  # `id` of the optimizer that is timed, and until when
        self._is_short = False
        self._resumes = 0.0
        self._clocked = [0.0] * 5
        self._run_then: dict[int, float] = {}
        self._sampler: StackSampler | InterruptSampler | None = None
        self._waits = WaitingCalls()
        self._operations = Operations()
        self._training_lines: list[CodeLocation] = []
        self._is_outside = False
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._keeps_gradients = False
        self._result: dict[str, Any] = {}

    def install(self) -> None:
        self._hook: RemovableHandle | None = register_optimizer_step_post_hook(self.on_step)
        self.loaders.after_pause = self._after_pause
        atexit.register(self._at_exit)

    def restart_in_fork(self) -> None:
        self._pid = os.getpid()
        self._reset()

    # ------------------------------------------------------------ step by step

    def on_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        """A hook of torch, after a step of an optimizer."""
        if id(optimizer) == self._timed:  # in the window: do as little as possible
            now = time.perf_counter()
            self._times.append(now)
            if now >= self._end:
                self._in_window(now)
            return
        first = self._optimizer
        if first is None:
            self._first_step(optimizer)
            return
        watched = first()
        if watched is None:  # the script has made another one, as for a second stage
            self._optimizer = weakref.ref(optimizer)
            self._timed = id(optimizer) if self._timed else 0
            self.on_step(optimizer, _, __)
        elif watched is optimizer:
            now = time.perf_counter()
            self._count += 1
            self._stage(now)

    def _first_step(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.loaders.thread = threading.get_ident()
        self._on_first_step()
        (self._folder / f"{self._pid}.trains").touch()
        self._threads = {"main": (threading.get_ident(), threading.get_native_id())}
        self._training_lines = note_training(sys._getframe(1))
        self.loaders.made_again.clear()
        self._count = 0
        self._began = time.perf_counter()
        self._result["until_first_s"] = self._began - self._made

    def _warm_up(self, now: float) -> None:
        plan = self._plan
        if self._count < plan.warmup_steps or now - self._began < plan.warmup_s:
            return
        if plan.watches:
            self._is_short = (now - self._began) / self._count < plan.short_s
            self._is_outside = plan.is_outside and is_read_from_outside(self._folder, self._pid)
            self._sampler = sampler_of(
                lambda: self._threads,
                lambda: not self.loaders.pause,
                evaluates=lambda: self.loaders.evaluates,
                # Dynamo would compile the handler, too.
                interrupts=not self._is_outside and not compile_counts()[0],
            )
            self._sampler.start()
        self._graphs_then = compile_counts()[0]
        self._window_file.write_text(SHORT if self._is_short else "", encoding="utf-8")
        self._stage = self._in_window
        self._opened = time.perf_counter()
        self._run_then = run_times()
        self._begin_slice(self._opened)

    def _in_window(self, now: float) -> None:
        if self.loaders.pause and now < self._resumes:
            return
        self.loaders.pause = 0
        if not self._times:
            self._begin_slice(now)
            return
        elapsed = now - self._opened
        plan = self._plan
        seconds = plan.seconds * (_LONGER if self._is_short else 1)
        steps = len(self._times) - 1 + sum(len(one) - 1 for one in self._slices)
        if elapsed < seconds or (steps < plan.steps and elapsed < 4 * seconds):
            if self._is_short:
                self._pause(now)
            return
        self._close_window()
        if plan.watches:
            self._waits.start()
            self._waits_from = self._count, now
            self._stage = self._in_waits
        else:
            self._finish()

    def _begin_slice(self, now: float) -> None:
        self._times = [now]
        self._clock_then = self._clock()
        self._timed = id(self._optimizer and self._optimizer())
        self._end = now + (_SLICE_S if self._is_short else self._plan.seconds)

    def _end_slice(self) -> None:
        self._slices.append(self._times)
        pairs = zip(self._clocked, self._clock(), self._clock_then, strict=True)
        self._clocked = [total + now - then for total, now, then in pairs]
        self._times = []
        self._timed = 0

    def _pause(self, now: float) -> None:
        """Leave the next steps unwatched, if batches of a DataLoader will show when to continue."""
        has_batches = self.loaders.batches > self._clock_then[2]
        self._end_slice()
        if has_batches:
            self.loaders.pause = 1
            self._resumes = now + _PAUSE_S
        else:
            self._begin_slice(now)

    def _after_pause(self, is_end: bool) -> None:
        """Called when a batch is requested, when no optimizer is running its hooks."""
        self.loaders.pause = 1
        if threading.get_ident() != self.loaders.thread:
            return
        is_over = time.perf_counter() >= self._resumes
        if not is_over and not is_end:
            self.loaders.pause = _PAUSE_BATCHES
            if self._hook is not None:
                self._hook.remove()
                self._hook = None
            return
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self.on_step)
        self.loaders.pause = 0 if is_over else 1  # if no further batch comes, steps end the pause

    def _in_waits(self, now: float) -> None:
        self._note_gradient()
        count, began = self._waits_from
        if self._count - count < _WAITS_STEPS and now - began < _WAITS_S:
            return
        self._waits.stop()
        self._note_waits()
        self._operations.start()
        self._stage = self._in_operations

    def _note_gradient(self) -> None:
        """A gradient that is the same tensor as a step before has been filled with zeros."""
        optimizer = None if self._optimizer is None else self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        gradients = (p.grad for group in groups for p in group["params"] if p.grad is not None)
        gradient = next(gradients, None)
        before = self._gradient and self._gradient()
        self._keeps_gradients |= gradient is not None and gradient is before
        self._gradient = None if gradient is None else weakref.ref(gradient)

    def _in_operations(self, _: float) -> None:
        if self._operations.count_step():
            return
        self._result["operations"] = self._operations.result(self._plan.trace)
        self._finish()

    def _over(self, _: float) -> None:
        """The last stage: the process is about to be ended."""

    # ------------------------------------------------------------ results

    @property
    def _window_file(self) -> Path:
        return self._folder / f"{self._pid}.window"

    def _clock(self) -> tuple[float, float, int, int, float]:
        loaders = self.loaders
        return loaders.waited_s, loaders.started_s, loaders.batches, *page_faults()

    def _close_window(self) -> None:
        self._window_file.unlink(missing_ok=True)
        open_s = max(time.perf_counter() - self._opened, 1e-9)
        runs = {
            thread: (then - self._run_then[thread]) / open_s
            for thread, then in run_times().items()
            if thread in self._run_then
        }
        seconds = {}
        if self._sampler is not None:
            self._sampler.stop()
            seconds = dict(self._sampler.seconds)
        if self._is_outside:
            wait_for(self._folder / f"{self._pid}{STACKS_READ}")
        if len(self._times) > 1:
            self._end_slice()
        elapsed = math.fsum(one[-1] - one[0] for one in self._slices)
        times = [later - one for s in self._slices for one, later in itertools.pairwise(s)]
        steps = len(times)
        self._count += steps
        waited, started, batches, faults, system = self._clocked
        graphs, breaks = compile_counts()
        self._result |= {
            "graphs": graphs,
            "graphs_in_window": graphs - self._graphs_then,
            "graph_breaks": breaks,
            "steps": steps,
            "seconds": elapsed,
            "step_s": elapsed / max(steps, 1),
            "times": times[:10_000],
            "waited_s": waited,
            "started_s": started,
            "batches": batches,
            "faults": faults,
            "system_s": system,
            "until_window_s": self._opened - self._began,
            "seen": as_rows(seconds),
            "runs": [[thread, share] for thread, share in runs.items()],
        }

    def _note_waits(self) -> None:
        steps = max(1, self._count - self._waits_from[0])
        self._result["waiting_calls"] = [
            [location.file, location.line, what, calls / steps, seconds / steps, copied / steps]
            for (location, what), (calls, seconds, copied) in self._waits.calls.items()
        ]

    def _finish(self) -> None:
        self._stage = self._over
        optimizer = None if self._optimizer is None else self._optimizer()
        write_whole(
            self._folder / f"{self._pid}.json",
            self._result
            | {
                "process": os.getpid(),
                "thread": self._threads["main"][1],
                "training_lines": self._training_lines,
                "evaluations": list(self.loaders.evaluations),
                "rank": int(os.environ.get("RANK", "0")),
                "world": int(os.environ.get("WORLD_SIZE", "1")),
                "loader": self.loaders.loader_facts(),
                "threads": torch.get_num_threads(),
                "tracer": tracer_name(),
                "traces_memory": tracemalloc.is_tracing(),
                "anomaly": torch.is_anomaly_enabled(),
                "optimizer": optimizer_facts(optimizer),
                "keeps_gradients": self._keeps_gradients,
                "device": device_of(optimizer),
                **_device_memory(device_of(optimizer)),
                "torch": torch.__version__,
            },
        )

    def _at_exit(self) -> None:
        """A script that ends before enough steps were counted still records those."""
        if os.getpid() != self._pid or self._stage == self._over or self._optimizer is None:
            return
        if self._stage == self._in_window and (self._slices or len(self._times) > 1):
            self._close_window()
        self._result["made"] = 1 + self._count  # the first step is not in the count
        self._finish()


def tracer_name() -> str:
    """The function that Python calls at each line or call of this thread; '' if none."""
    tracer = sys.gettrace() or sys.getprofile()
    return "" if tracer is None else getattr(tracer, "__qualname__", type(tracer).__qualname__)


def as_rows(seconds: dict[tuple[str, StackSample], float]) -> list[list[Any]]:
    """The samples of a sampler, for a file: thread, phase, kind, waits, file, line, function, seconds."""
    return [
        [thread, one.phase, one.kind, one.waits, *(one.location or ("", 0, "")), total]
        for (thread, one), total in seconds.items()
    ]


def optimizer_facts(optimizer: Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {}
    group = optimizer.param_groups[0]
    convolutions = [p for p in group["params"] if p.ndim == 4]
    is_channels_last = all(p.is_contiguous(memory_format=torch.channels_last) for p in convolutions)
    return {
        "name": type(optimizer).__name__,
        "is_torchs": type(optimizer).__module__.startswith("torch.optim"),
        "can_fuse": "fused" in group,
        "fused": bool(group.get("fused")),
        "has_convolutions": bool(convolutions),
        "is_channels_last": is_channels_last,
        "tensors": sum(len(one["params"]) for one in optimizer.param_groups),
    }


def device_of(optimizer: Optimizer | None) -> str:
    if optimizer is None:
        return "cpu"
    return next((p.device.type for g in optimizer.param_groups for p in g["params"]), "cpu")


def _device_memory(device: str) -> dict[str, int]:
    """Peak bytes of tensors on an accelerator, and its memory; 0 on a CPU and if unknown."""
    if device in ("cpu", "meta"):
        return {"device_bytes": 0, "device_limit_bytes": 0}
    memory_info = getattr(torch.get_device_module(device), "mem_get_info", None)
    return {
        "device_bytes": int(torch.accelerator.max_memory_allocated()),
        "device_limit_bytes": 0 if memory_info is None else int(memory_info()[1]),
    }


def compile_counts() -> tuple[int, dict[str, int]]:
    """Graphs compiled so far, and graph breaks by reason (the first line of torch's).

    Imports nothing; without torch.compile (0, {}).
    """
    if "torch._dynamo" not in sys.modules:
        return 0, {}
    counters = torch._dynamo.utils.counters
    reasons: dict[str, int] = {}
    for reason, times in counters["graph_break"].items():
        line = reason.strip().partition("\n")[0]
        reasons[line] = reasons.get(line, 0) + times
    return counters["stats"]["unique_graphs"], reasons
