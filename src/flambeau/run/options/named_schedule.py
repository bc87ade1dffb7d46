"""A learning-rate schedule by name, with the numbers that some schedules take."""

from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.errors import InputError
from flambeau.run.options.durations import parse_duration

GAMMA = {"multistep": 0.1, "exponential": 0.9}
"""The default factors of the schedules that have one."""


@dataclass(frozen=True)
class NamedSchedule:
    """A value of `Run(schedule=...)` where a name alone is not enough.

    Args:
        name: of `flambeau train --schedule`.
        gamma: the factor of 'multistep' at each milestone (default 0.1), or of 'exponential' per epoch (0.9).
        milestones: of 'multistep', durations from the start of the run: ('30ep', '60ep'), ('50%', '75%').
    """

    name: str
    gamma: float | None = None
    milestones: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.gamma is not None and self.name not in GAMMA:
            raise InputError(f"gamma has no effect with schedule = {self.name!r}: leave it out")
        if self.gamma is not None and not 0 < self.gamma <= 1:
            raise InputError(f"gamma must be above 0 and at most 1, got {self.gamma}")
        if self.milestones is not None and self.name != "multistep":
            raise InputError(
                f"milestones has no effect with schedule = {self.name!r}: leave it out"
            )
        for text in self.milestones or ():
            parse_duration(text, name="milestones", units="% ep st")

    def __str__(self) -> str:
        numbers = [] if self.gamma is None else [f"gamma={self.gamma:g}"]
        numbers += [] if self.milestones is None else [f"milestones={','.join(self.milestones)}"]
        return f"{self.name}({', '.join(numbers)})" if numbers else self.name
