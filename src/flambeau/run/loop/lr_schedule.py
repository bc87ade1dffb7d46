"""The multiplier of the learning rate: warm-up and schedule of the step; 'plateau' also needs evaluations.

The formulas are in the recipes training/schedules.py, cyclic_schedules.py and plateau.py.
"""

import functools
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Literal

from flambeau.errors import InputError
from flambeau.recipes.training import cyclic_schedules, schedules
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.run.loop.step_plan import StepPlan
from flambeau.run.options.durations import parse_duration
from flambeau.run.options.named_schedule import GAMMA, NamedSchedule

PATIENCE = 3  # epochs; with 5 a run of 16 or 30 epochs would see few reductions; chosen
FACTOR = 0.1  # torch's default
_KEY = "plateau"  # in a checkpoint, among the user's objects
SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": schedules.constant,
    "linear": schedules.linear,
    "cosine": schedules.cosine,
    "multistep": schedules.multistep,
    "exponential": schedules.exponential,
    "polynomial": schedules.polynomial,
    "wsd": schedules.wsd,
    "one-cycle": cyclic_schedules.one_cycle,
    "cosine-restarts": cyclic_schedules.cosine_restarts,
}
_MILESTONES = ("50%", "75%")  # as for CIFAR in arXiv 1512.03385
_WSD_DECAY = 0.2  # of the run: more does not help in arXiv 2405.18392, section 3
_CYCLES = 3  # the last of which is 4/7 of the run
_CYCLE_MULTIPLIER = 2  # SGDR's doubling


class LRSchedule:
    """The multiplier of each step, by a name, perhaps with numbers, a function or a ReduceOnPlateau."""

    def __init__(
        self,
        plan: StepPlan,
        schedule: str | NamedSchedule | Callable[[int], float] | ReduceOnPlateau,
        *,
        warmup: str,
        metric: str,
        mode: Literal["max", "min"],
    ) -> None:
        if schedule == "plateau":
            schedule = ReduceOnPlateau(mode=mode, patience=PATIENCE, factor=FACTOR)
        is_named = isinstance(schedule, (str, NamedSchedule))
        self.name = str(schedule) if is_named else "function"
        """For the identity of the run."""
        self._plateau: ReduceOnPlateau | None = None
        if isinstance(schedule, ReduceOnPlateau):
            self._plateau, self.name, schedule = schedule, "plateau", "constant"
        self._of_step = schedule_of(plan, schedule, warmup=warmup)
        self._metric = metric
        self._value: float | None = None

    def __call__(self, step: int) -> float:
        """The multiplier of a step, from 0."""
        multiplier = self._of_step(step)
        return multiplier if self._plateau is None else multiplier * self._plateau.multiplier

    def note(self, figures: Mapping[str, float]) -> None:
        """Note an evaluation, which counts at the end of the epoch because a resume may repeat it.

        One in mid-epoch is not repeated, so a checkpoint holds it until then.
        """
        if self._metric in figures:
            self._value = figures[self._metric]

    def end_epoch(self, *, say: Callable[[str], None]) -> None:
        """Count the evaluation of the epoch; InputError: the metric was not logged, or is NaN."""
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

    def saved_objects(self) -> dict[str, Any]:
        """What belongs into a checkpoint, by name."""
        return {} if self._plateau is None else {_KEY: self}

    def state_dict(self) -> dict[str, Any]:
        assert self._plateau is not None
        return {**self._plateau.state_dict(), "noted": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert self._plateau is not None
        self._plateau.load_state_dict(state)
        self._value = state.get("noted")  # missing in version 0.1


def schedule_of(
    plan: StepPlan, schedule: str | NamedSchedule | Callable[[int], float], *, warmup: str
) -> Callable[[int], float]:
    """The learning rate's multiplier by step, from 0: a named schedule after its warm-up, or `schedule`.

    InputError: an unknown name, a warm-up as long as the run or beside a function, or a function that returns
    no multiplier.
    """
    length = parse_duration(warmup, name="warmup", units="% ep st")
    if callable(schedule):
        if length.amount:
            raise InputError(
                f"warmup = {warmup!r} would do nothing: the schedule is your own function"
            )
        checked = functools.partial(_checked, schedule)
        checked(0)
        return checked
    named = NamedSchedule(schedule) if isinstance(schedule, str) else schedule
    name = named.name
    if name not in SCHEDULES:
        known = ", ".join([*SCHEDULES, "plateau"])
        raise InputError(f"schedule must be {known} or a function, got {name!r}")
    steps = length.steps(steps_per_epoch=plan.steps_per_epoch, total_steps=plan.total_steps)
    if steps and steps >= plan.total_steps:
        raise InputError(
            f"warmup = {warmup!r} is {steps} of the {plan.total_steps} steps: nothing is left"
        )
    multiplier = functools.partial(SCHEDULES[name], **_settings(named, plan, steps))
    try:
        multiplier(0)
    except ValueError as error:
        raise InputError(f"schedule = {name!r} does not fit this run: {error}") from error
    return multiplier


def _checked(schedule: Callable[[int], float], step: int) -> float:
    value = schedule(step)
    # isinstance with an abstract class takes a microsecond.
    is_number = type(value) is float or isinstance(value, numbers.Real)
    if not is_number or not 0 <= value < math.inf:
        raise InputError(
            "schedule must give a factor of the learning rate, a number of at least 0; for step "
            f"{step} it gave {value!r:.100}"
        )
    return float(value)


def _settings(named: NamedSchedule, plan: StepPlan, warmup_steps: int) -> dict[str, Any]:
    name = named.name
    total_steps = plan.total_steps
    gamma = GAMMA.get(name, 1.0) if named.gamma is None else named.gamma
    if name == "one-cycle":  # its rise is the warm-up
        if not warmup_steps:
            raise InputError(
                "schedule = 'one-cycle' rises over the warm-up, which is 0 steps: give a longer one, such "
                "as warmup = '30%'"
            )
        return {"total_steps": total_steps, "rise": warmup_steps / total_steps}
    settings: dict[str, Any] = {"total_steps": total_steps, "warmup_steps": warmup_steps}
    if name == "multistep":
        settings |= {"gamma": gamma, "milestones": _milestones(named, plan, warmup_steps)}
    elif name == "exponential":
        epochs = (total_steps - warmup_steps) / plan.steps_per_epoch
        settings["end"] = gamma**epochs
    elif name == "wsd":
        decay = max(1, round(_WSD_DECAY * total_steps))
        settings["decay_steps"] = min(decay, total_steps - warmup_steps)
    elif name == "cosine-restarts":
        settings |= {"cycles": _CYCLES, "cycle_multiplier": _CYCLE_MULTIPLIER}
    return settings


def _milestones(named: NamedSchedule, plan: StepPlan, warmup_steps: int) -> list[int]:
    """The steps at which 'multistep' lowers the rate."""
    total_steps = plan.total_steps
    steps = set[int]()
    for text in named.milestones or _MILESTONES:
        length = parse_duration(text, name="milestones", units="% ep st")
        step = length.steps(steps_per_epoch=plan.steps_per_epoch, total_steps=total_steps)
        if step in steps and named.milestones is not None:
            raise InputError(f"milestones = {','.join(named.milestones)!r} name step {step} twice")
        if warmup_steps <= step < total_steps:
            steps.add(step)
        elif named.milestones is not None:
            raise InputError(
                f"milestones = {','.join(named.milestones)!r}: {text} is step {step}, which is not after the "
                f"warm-up ({warmup_steps} steps) and before the end of the run ({total_steps} steps)"
            )
    return sorted(steps)
