"""The progress bar of a run on a terminal or in a notebook, and its lines for the user."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flambeau.run.folder.events_log import EventsLog
from flambeau.run.loop.cpu_waits import CpuWaits, wait_remark
from flambeau.run.loop.state import ResumableState
from flambeau.run.loop.step_plan import StepPlan
from flambeau.terminal import REFRESH_S, LiveLine, bar_line, clock, in_notebook, say, shows_bars

if TYPE_CHECKING:
    from rich.table import Table

_LITTLE_WAIT = 0.1  # share of the time; less waiting for data is not worth a remedy; chosen
_LOSS_EVERY_S = 1.0
_NUM_LOSSES = 50  # averaged for display, as single losses jump; chosen
_SMOOTH_S = 5.0  # speed and waiting are averaged over this time; chosen
# Seconds of steps after which a wait for CPUs is reported, even before the second line of figures; chosen.
_EARLY_S = 20.0


def _verdict(data_wait: float, waits: CpuWaits | None) -> str:
    said = f"waits for data {data_wait:.0%} of the time"
    if waits is not None and (remark := wait_remark(waits)) is not None:
        return f"{said}; {remark}"
    if data_wait < _LITTLE_WAIT:
        return f"{said}: the model sets the pace"
    return f"{said}: `flambeau doctor` finds out why, and what helps"


class ProgressBar:
    """One bar over all steps of a run on standard error, if `shown`, and lines above it, if not `silent`."""

    def __init__(self, *, shown: bool, silent: bool = False) -> None:
        self._shown = shown and not silent and shows_bars()
        self.silent = silent
        self.is_in_notebook = self._shown and in_notebook()
        """Whether a notebook's cell shows the bar."""
        self._line: LiveLine | None = None
        self._figures: _Figures | None = None
        self._on_cpu = False
        self._due = 0.0
        self._lines = 0
        self._waits: CpuWaits | None = None
        self._has_remarked = False
        self._looked_early = False
        self._said = set[str]()
        self.listener: Callable[[Mapping[str, Any]], None] | None = None
        """Receives events, for a program."""
        self.events: EventsLog | None = None
        """The run's events.jsonl."""

    def start(self, state: ResumableState, plan: StepPlan, *, world: int) -> None:
        """Show the bar, if wanted and a step is left."""
        self._on_cpu = state.window.device.type == "cpu"
        if self._shown and self._line is None and state.step < plan.total_steps:
            self._figures = _Figures(state, plan, world)
            self._line = LiveLine(self._figures.draw, is_kept=self.is_in_notebook)

    def start_epoch(self) -> None:
        """Exclude the time since the last step, such as an evaluation."""
        if self._figures is not None:
            self._figures.start_epoch()

    def step(self) -> None:
        self._look_early()
        if self._line is None or self._figures is None:
            return
        now = time.perf_counter()
        if self._figures.state.position >= self._figures.state.data_length:
            self._figures.epoch_ended = now
        if now >= self._due:
            self._figures.update()
            self._line.refresh()
            self._due = time.perf_counter() + REFRESH_S

    def note(self, row: Mapping[str, float]) -> None:
        """Note a line's figures; the second, without warm-up, also prints a verdict."""
        if self._figures is not None:
            self._figures.loss = row.get("train_loss")
        self._lines += 1
        if self._lines == 1 and self._on_cpu and not self.silent:
            self._waits = CpuWaits()
        if self._lines == 2 and "data_wait" in row and not self.silent:
            if self._has_remarked:
                text = f"waits for data {row['data_wait']:.0%} of the time; for a CPU, see above"
            else:
                text = _verdict(row["data_wait"], self._waits)
            self.show(text)

    def _look_early(self) -> None:
        """Where steps take long, the second line comes late: say after some time what threads wait for."""
        if self._looked_early or self._lines >= 2 or self.silent or not self._on_cpu:
            return
        if self._waits is None:  # after the first step, which has the warm-up in it
            self._waits = CpuWaits()
        elif self._waits.seconds >= _EARLY_S:
            self._looked_early = True
            if (remark := wait_remark(self._waits)) is not None:
                self._has_remarked = True
                self.show(remark)

    @contextlib.contextmanager
    def evaluates(self) -> Iterator[None]:
        self._show_evaluation(True)
        try:
            yield
        finally:
            self._show_evaluation(False)

    def _show_evaluation(self, now: bool, /) -> None:
        if self._line is not None and self._figures is not None:
            self._figures.is_evaluating = now
            self._line.refresh()

    def say(self, text: str) -> None:
        """Print a line on standard error, and log it as an event."""
        self.show(text)
        self.log_event(text)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)

    def say_from_any_rank(self, text: str) -> None:
        """Like `say`, on any rank: for what happens to one process alone."""
        say(text)
        self.log_event(text)

    def log_event(self, text: str, **figures: float) -> None:
        """Log an event in the run folder without printing it."""
        if self.events is not None and not self.silent:
            self.events.add(text, **figures)

    def show(self, text: str, *, green: str = "") -> None:
        """Print a line on standard error; the part `green` is shown in that color."""
        if not self.silent:
            say(text, green=green)

    def say_saved(self, signal: str, *, step: int, folder: Path) -> None:
        """Say that a signal stopped the run, and how to continue it."""
        again = "the same command goes on from here"
        if in_notebook():
            again = "run the cell again, from train(...) or Run(...) on, to continue"
        self.say(f"{signal}: saved at step {step} in {folder}; {again}")

    def emit(self, event: Mapping[str, Any]) -> None:
        if self.listener is not None and not self.silent:
            self.listener(event)

    def close(self) -> None:
        if self._line is not None and self._figures is not None:
            self._line.stop()
            self._line = self._figures = None


class _Figures:
    """What the bar shows, and the current speed.

    Attributes:
        epoch_ended: time of the last step of the epoch.
    """

    def __init__(self, state: ResumableState, plan: StepPlan, world: int) -> None:
        self.state, self._plan, self._world = state, plan, world
        self.loss: float | None = None
        self.is_evaluating = False
        self.epoch_ended: float | None = None
        self._newest_loss = NewestLoss(state.window.device)
        # Seconds, steps, images, seconds of waiting; exponentially fading.
        self._recent: list[float] = []
        self._between_epochs = 0.0
        self._mark = self._now()

    def start_epoch(self) -> None:
        self._mark = self._now()
        if self.epoch_ended is not None:
            self._between_epochs = self._mark[0] - self.epoch_ended
        self.epoch_ended = None

    def _now(self) -> tuple[float, int, int, float]:
        window = self.state.window
        return time.perf_counter(), self.state.step, window.total_samples, window.total_wait_s

    def update(self) -> None:
        loss = self._newest_loss.read(self.state.window.losses)
        self.loss = self.loss if loss is None else loss
        before, self._mark = self._mark, self._now()
        new = [float(now - then) for now, then in zip(self._mark, before, strict=True)]
        if new[0] <= 0 or new[1] <= 0:
            return  # rolled back
        fading = math.exp(-new[0] / _SMOOTH_S)
        old = self._recent or [0.0] * len(new)
        self._recent = [fading * past + now for past, now in zip(old, new, strict=True)]

    def draw(self, columns: int) -> "Table":
        """The line; the number of a field is its priority where there is little room."""
        state, plan = self.state, self._plan
        num_epochs = math.ceil(plan.total_steps / plan.steps_per_epoch)
        epoch = min(state.epoch + 1, num_epochs)
        fields = {f"{int(100 * state.step / plan.total_steps):2}%": 7}
        if self.loss is not None:
            fields[f"loss {self.loss:.4f}"] = 8
        if self.is_evaluating:
            fields["evaluating"] = 6
        elif self._recent:
            last = min((state.epoch + 1) * plan.steps_per_epoch, plan.total_steps)
            of_epoch = max(0, last - state.step)
            fields |= self._speed(of_epoch, epochs_after=num_epochs - epoch)
        if memory := peak_bytes(state.window.device):
            fields[f"{memory / 2**30:.1f} GiB"] = 2
        before = {f"epoch {epoch}/{num_epochs}": 9}
        return bar_line(columns, state.step, plan.total_steps, before=before, after=fields)

    def _speed(self, steps_of_epoch: int, *, epochs_after: int) -> dict[str, int]:
        """Speed, waiting, and the time left for the run and the epoch."""
        seconds, steps, images, waited = self._recent
        images_per_s = images * self._world / seconds
        left = (self._plan.total_steps - self.state.step) * seconds / steps
        left += epochs_after * self._between_epochs
        return {
            f"{images_per_s:.{0 if images_per_s >= 10 else 2}f} images/s": 5,
            f"waiting {min(1.0, waited / seconds):.0%}": 4,
            f"{clock(left)} left": 6,
            f"epoch {clock(steps_of_epoch * seconds / steps)}": 3,
        }


def peak_bytes(device: torch.device) -> int:
    """Peak memory: on an accelerator what was allocated, on the CPU that of this process; 0: not known."""
    if device.type == "meta":
        return 0
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated())
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class NewestLoss:
    """The mean of the newest losses, at most once per second, without waiting for the device.

    On CUDA it is copied behind the queued work, and read once it has arrived. On other accelerators nothing
    is read between log points.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._due = 0.0
        self._on_host: Tensor | None = None
        self._arrived: torch.Event | None = None

    def read(self, losses: Sequence[Tensor]) -> float | None:
        """The mean of the last losses (0-d), or slightly earlier ones; None if nothing is new."""
        value = self._arrived_value()
        if not losses or time.perf_counter() < self._due or self._arrived is not None:
            return value
        self._due = time.perf_counter() + _LOSS_EVERY_S
        if self._device.type == "cpu":
            return float(torch.stack(list(losses[-_NUM_LOSSES:])).mean())
        if self._device.type == "cuda":
            if self._on_host is None:
                self._on_host = torch.zeros((), pin_memory=True)
            self._on_host.copy_(torch.stack(list(losses[-_NUM_LOSSES:])).mean(), non_blocking=True)
            self._arrived = torch.Event(self._device)
            self._arrived.record()
        return value

    def _arrived_value(self) -> float | None:
        """The copied value, if it has arrived; does not wait."""
        if self._arrived is None or self._on_host is None or not self._arrived.query():
            return None
        self._arrived = None
        return float(self._on_host)
