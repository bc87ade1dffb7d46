"""One line per epoch on the terminal: training loss, figures, a mark on the best, time."""

import math
import time
from collections.abc import Mapping

from flambeau.run.loop.progress_bar import ProgressBar
from flambeau.run.loop.state import ResumableState
from flambeau.run.loop.step_plan import StepPlan
from flambeau.terminal import clock

_MARK = "* best"


class EpochLines:
    """Reports each epoch at its end, and each evaluation."""

    def __init__(
        self, state: ResumableState, plan: StepPlan, *, best: str, progress: ProgressBar
    ) -> None:
        self._state, self._plan, self._best, self._progress = state, plan, best, progress
        self._is_reported = True
        self.start()

    def start(self) -> None:
        """Start or continue an epoch; the previous one is reported if it was not evaluated."""
        self.end()
        self._epoch = self._state.epoch
        self._start = time.perf_counter()
        self._is_reported = False
        self.restart()

    def restart(self) -> None:
        """Average the loss from here on: the steps before are undone, or reported."""
        self._loss = 0.0
        self._num_steps = 0
        self._step = self._state.step

    def add(self, row: Mapping[str, float]) -> None:
        """Count the losses since the last line of metrics.jsonl."""
        if "train_loss" in row:
            num_steps = self._state.step - self._step
            self._loss += row["train_loss"] * num_steps
            self._num_steps, self._step = self._num_steps + num_steps, self._state.step

    def evaluation(self, figures: Mapping[str, float]) -> None:
        """Report an evaluation."""
        self._is_reported = True
        is_best = self._best in figures and self._state.best.step == self._state.step
        is_within = self._state.position < self._state.data_length
        self._report(figures, is_best=is_best, is_within=is_within)

    def end(self) -> None:
        if not self._is_reported and self._num_steps:
            self._report({}, is_best=False, is_within=False)
        self._is_reported = True

    def _report(self, figures: Mapping[str, float], *, is_best: bool, is_within: bool) -> None:
        state = self._state
        plan = self._plan
        seconds = time.perf_counter() - self._start
        epochs = math.ceil(plan.total_steps / plan.steps_per_epoch)
        parts = [f"epoch {self._epoch + 1}/{epochs}"]
        if is_within:
            parts.append(f"step {state.step}/{plan.total_steps}")
        row = {"event": "epoch", "epoch": self._epoch, "step": state.step}
        row |= {"epochs": epochs, "steps": plan.total_steps}
        if self._num_steps:
            row["train_loss"] = self._loss / self._num_steps
            parts.append(f"loss {row['train_loss']:.4f}")
        for name, figure in figures.items():
            mark = f" {_MARK}" if is_best and name == self._best else ""
            parts.append(f"{name} {figure:.4f}{mark}")
        parts.append(f"{seconds:.1f} s" if seconds < 60 else clock(seconds))
        self._progress.show("  ".join(parts), green=_MARK if is_best else "")
        self._progress.emit(
            {**row, "metrics": {**figures}, "best": is_best, "seconds": round(seconds, 3)}
        )
