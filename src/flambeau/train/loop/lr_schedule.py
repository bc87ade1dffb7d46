"""The multiplier of the learning rate: a function of the step, and for 'plateau' of the evaluations too."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from flambeau.errors import InputError
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.train.loop.step_plan import StepPlan

PATIENCE = 3  # epochs; with 5 a run of 16 or 30 epochs would see few reductions; chosen
FACTOR = 0.1  # torch's default
_KEY = "plateau"  # among the objects of the user in a checkpoint


class LRSchedule:
    """What `Run` asks for the multiplier of each step.

    Args:
        plan: of the run.
        schedule: a name, a function of the step, or a ReduceOnPlateau with settings of one's own.
        warmup: a duration.
        metric: what 'plateau' watches.
        mode: 'max' or 'min', what is better.

    Raises:
        InputError: as `StepPlan.schedule` says.
    """

    def __init__(
        self,
        plan: StepPlan,
        schedule: str | Callable[[int], float] | ReduceOnPlateau,
        *,
        warmup: str,
        metric: str,
        mode: Literal["max", "min"],
    ) -> None:
        if schedule == "plateau":
            schedule = ReduceOnPlateau(mode=mode, patience=PATIENCE, factor=FACTOR)
        self.name = schedule if isinstance(schedule, str) else "function"
        """For the identity of the run."""
        self._plateau: ReduceOnPlateau | None = None
        if isinstance(schedule, ReduceOnPlateau):
            self._plateau, self.name, schedule = schedule, "plateau", "constant"
        self._of_step = plan.schedule(schedule, warmup=warmup)
        self._metric = metric
        self._value: float | None = None

    def __call__(self, step: int) -> float:
        """The multiplier of a step, from 0."""
        multiplier = self._of_step(step)
        return multiplier if self._plateau is None else multiplier * self._plateau.multiplier

    def note(self, figures: Mapping[str, float]) -> None:
        """Take note of an evaluation. It counts at the end of the epoch: a resume may repeat it."""
        if self._metric in figures:
            self._value = figures[self._metric]

    def end_epoch(self, *, say: Callable[[str], None]) -> None:
        """Count the evaluation of an epoch.

        Args:
            say: takes a line for the user where the rate falls.

        Raises:
            InputError: there was none of the metric, or it is NaN.
        """
        plateau, value = self._plateau, self._value
        self._value = None
        if plateau is None:
            return
        if value is None or value != value:
            raise InputError(
                f"schedule = 'plateau' needs {self._metric!r} once per epoch, and it was "
                f"{'not logged' if value is None else 'NaN'}: log it within run.evaluate(), or give Run "
                "another best="
            )
        before = plateau.multiplier
        after = plateau.step(value)
        if after != before:
            say(
                f"{self._metric} has stopped improving: the learning rate is now {after:.4g} of its base"
            )

    def parts(self) -> dict[str, Any]:
        """What of it belongs into a checkpoint, by name."""
        return {} if self._plateau is None else {_KEY: self._plateau}
