"""The length of a run in steps, and at which of them something is due."""

import functools
from collections.abc import Callable
from typing import Any

from flambeau.errors import InputError
from flambeau.recipes.training import cyclic_schedules, schedules
from flambeau.train.settings.durations import parse_duration

SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": schedules.constant,
    "linear": schedules.linear,
    "cosine": schedules.cosine,
    "multistep": schedules.multistep,
    "polynomial": schedules.polynomial,
    "wsd": schedules.wsd,
    "one-cycle": cyclic_schedules.one_cycle,
    "cosine-restarts": cyclic_schedules.cosine_restarts,
}
# Of the run, where multistep divides by 10, as for CIFAR in arXiv 1512.03385.
_MILESTONES = (0.5, 0.75)
_WSD_DECAY = 0.2  # of the run: the most that arXiv 2405.18392, section 3, finds to be of use
_CYCLES, _CYCLE_MULTIPLIER = (
    3,
    2,
)  # SGDR's doubling; three of them end in a last one of 4/7 of the run


class StepPlan:
    """Durations of a run, turned into steps once.

    Args:
        steps_per_epoch: optimizer steps in an epoch.
        duration: of the run.
        checkpoint_every: a duration.
        log_every: in steps.

    Raises:
        InputError: a duration of another form.
    """

    def __init__(
        self, *, steps_per_epoch: int, duration: str, checkpoint_every: str, log_every: int
    ) -> None:
        length = parse_duration(duration, name="duration")
        every = parse_duration(checkpoint_every, name="checkpoint_every")
        self.steps_per_epoch = steps_per_epoch
        self.total_steps = max(1, length.steps(steps_per_epoch=steps_per_epoch))
        self.save_every = max(1, every.steps(steps_per_epoch=steps_per_epoch))
        self.log_every = log_every

    def next_event(self, step: int) -> int:
        """The next step after `step` at which the loop has something to do."""
        intervals = (self.log_every, self.save_every)
        return min(self.total_steps, *((step // every + 1) * every for every in intervals))

    def schedule(
        self, name: str | Callable[[int], float], *, warmup: str
    ) -> Callable[[int], float]:
        """The multiplier of the learning rate as a function of the step, from 0.

        Args:
            name: one of SCHEDULES; a function is taken as it is.
            warmup: a duration, in which a named schedule rises to 1.

        Raises:
            InputError: an unknown name, a warm-up as long as the run, or one beside a function.
        """
        length = parse_duration(warmup, name="warmup", units="% ep st")
        if callable(name):
            if length.amount:
                raise InputError(
                    f"warmup = {warmup!r} would do nothing: the schedule is your own function"
                )
            return name
        if name not in SCHEDULES:
            known = ", ".join([*SCHEDULES, "plateau"])
            raise InputError(f"schedule must be {known} or a function, got {name!r}")
        steps = length.steps(steps_per_epoch=self.steps_per_epoch, total_steps=self.total_steps)
        if steps and steps >= self.total_steps:
            raise InputError(
                f"warmup = {warmup!r} is {steps} of the {self.total_steps} steps: nothing is left"
            )
        schedule = functools.partial(SCHEDULES[name], **_settings(name, self.total_steps, steps))
        try:
            schedule(0)
        except ValueError as error:
            raise InputError(f"schedule = {name!r} does not fit this run: {error}") from error
        return schedule


def _settings(name: str, total_steps: int, warmup_steps: int) -> dict[str, Any]:
    """What a named schedule is called with."""
    if name == "one-cycle":  # its rise is the warm-up
        if not warmup_steps:
            raise InputError(
                "schedule = 'one-cycle' rises over the warm-up, which is 0 steps: give a longer one, such "
                "as warmup = '30%'"
            )
        return {"total_steps": total_steps, "rise": warmup_steps / total_steps}
    settings: dict[str, Any] = {"total_steps": total_steps, "warmup_steps": warmup_steps}
    if name == "multistep":
        milestones = {round(share * total_steps) for share in _MILESTONES}
        settings["milestones"] = sorted(m for m in milestones if warmup_steps <= m < total_steps)
    elif name == "wsd":
        decay = max(1, round(_WSD_DECAY * total_steps))
        settings["decay_steps"] = min(decay, total_steps - warmup_steps)
    elif name == "cosine-restarts":
        settings |= {"cycles": _CYCLES, "cycle_multiplier": _CYCLE_MULTIPLIER}
    return settings
