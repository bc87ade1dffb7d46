"""The length of a run in steps, and at which of them something is due."""

import functools
from collections.abc import Callable
from typing import Any

from flambeau.data.errors import InputError
from flambeau.recipes.training import schedules
from flambeau.train.durations import parse_duration

SCHEDULES: dict[str, Callable[..., float]] = {
    "constant": schedules.constant,
    "linear": schedules.linear,
    "cosine": schedules.cosine,
    "multistep": schedules.multistep,
}
_MILESTONES = (
    0.5,
    0.75,
)  # of the run, where multistep divides by 10, as for CIFAR in arXiv 1512.03385


class Plan:
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
        """The next step after `step` at which the loop must look up."""
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
                    f"warmup = {warmup!r} would do nothing: the schedule is a function of yours"
                )
            return name
        if name not in SCHEDULES:
            raise InputError(f"schedule must be {', '.join(SCHEDULES)} or a function, got {name!r}")
        steps = length.steps(steps_per_epoch=self.steps_per_epoch, total_steps=self.total_steps)
        if steps and steps >= self.total_steps:
            raise InputError(
                f"warmup = {warmup!r} is {steps} of the {self.total_steps} steps: nothing is left"
            )
        settings: dict[str, Any] = {"total_steps": self.total_steps, "warmup_steps": steps}
        if name == "multistep":
            milestones = {round(share * self.total_steps) for share in _MILESTONES}
            settings["milestones"] = sorted(m for m in milestones if steps <= m < self.total_steps)
        return functools.partial(SCHEDULES[name], **settings)
