"""A schedule of the learning rate by its name, with the numbers that some of them take."""

from collections.abc import Sequence
from dataclasses import dataclass

from flambeau.errors import InputError
from flambeau.run.options.durations import parse_duration

GAMMA = {"multistep": 0.1, "exponential": 0.9}
"""The factor of the schedules that have one, where it is left open."""


@dataclass(frozen=True)
class NamedSchedule:
    """What `Run(schedule=...)` takes where a name alone is not enough.

    Args:
        name: of `flambeau train --schedule`.
        gamma: the factor of 'multistep' at each milestone (None is 0.1), of 'exponential' per epoch (0.9).
        milestones: durations from the start of the run, of 'multistep': ('30ep', '60ep'), ('50%', '75%').

    Raises:
        InputError: a number that this schedule does not take, or milestones that are no durations.

    Example:
        >>> NamedSchedule("multistep", milestones=("30ep", "60ep"), gamma=0.2).name
        'multistep'
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
        """For the identity of a run."""
        numbers = [] if self.gamma is None else [f"gamma={self.gamma:g}"]
        numbers += [] if self.milestones is None else [f"milestones={','.join(self.milestones)}"]
        return f"{self.name}({', '.join(numbers)})" if numbers else self.name
