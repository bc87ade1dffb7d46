"""Which trial comes next: a pure function of the rules and of the results so far, in their order.

A sweep is a sequence of steps. A step trains one trial up to a rung: the first rung of a new trial, or the
next one of a trial that was among the best of its rung. Step n is decided from the results of the steps
before it except the last `ahead`, so that `ahead + 1` of them can run at once; how many do run, in which
order they end, and how often they are killed changes nothing.

Successive halving without rounds: Li et al., A System for Massively Parallel Hyperparameter Tuning,
arXiv 1810.05934 (ASHA), with the results in the order of steps in place of the order of the clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Rules:
    """What a plan depends on besides results.

    Attributes:
        trials: settings to try.
        rungs: epochs after which trials are compared, the last one the whole training.
        factor: of the trials at a rung, one in so many goes on.
        ahead: steps that may be decided without the results just before.
    """

    trials: int
    rungs: tuple[int, ...]
    factor: int
    ahead: int
    mode: Literal["max", "min"]

    def is_better(self, one: float, other: float) -> bool:
        return one > other if self.mode == "max" else one < other


@dataclass(frozen=True)
class Step:
    """Train a trial up to a rung."""

    trial: int
    rung: int


@dataclass(frozen=True)
class Outcome:
    """Of a step.

    Attributes:
        value: the figure; None if the trial has failed.
    """

    value: float | None


def next_step(
    rules: Rules, steps: Sequence[Step], outcomes: Mapping[int, Outcome]
) -> tuple[Step, int] | Literal["wait", "over"]:
    """The step after `steps`, and how many results it was decided from.

    Args:
        steps: all so far.
        outcomes: by number of the step.

    Returns:
        The step; 'wait' for an earlier result; 'over' if there is none.
    """
    known = max(0, len(steps) - rules.ahead)
    while all(number in outcomes for number in range(known)):
        seen = [outcomes[number] for number in range(known)]
        step = _decided(rules, steps, seen)
        if step is None and known == len(steps):
            step = _last_one(rules, steps, seen)
            if step is None:
                return "over"
        if step is not None:
            return step, known
        known += 1
    return "wait"


def _decided(rules: Rules, steps: Sequence[Step], outcomes: Sequence[Outcome]) -> Step | None:
    """Go on with the best trial of the highest rung that deserves it, else begin a new one."""
    started = set(steps)
    for rung in reversed(range(len(rules.rungs) - 1)):
        for trial in _best(rules, rung, steps, outcomes):
            if (step := Step(trial, rung + 1)) not in started:
                return step
    trials = sum(step.rung == 0 for step in steps)
    return Step(trials, 0) if trials < rules.trials else None


def _last_one(rules: Rules, steps: Sequence[Step], outcomes: Sequence[Outcome]) -> Step | None:
    """Where so few trials were made that none was trained to the end, the best one is."""
    top = len(rules.rungs) - 1
    if any(step.rung == top for step in steps):
        return None
    for rung in reversed(range(top)):
        for trial in _best(rules, rung, steps, outcomes, at_least=1):
            return Step(trial, rung + 1)
    return None


def _best(
    rules: Rules, rung: int, steps: Sequence[Step], outcomes: Sequence[Outcome], at_least: int = 0
) -> list[int]:
    """The trials of a rung that may go on, best first; failed ones count as finished, and never do."""
    finished = [
        (outcome.value, step.trial)
        for step, outcome in zip(steps, outcomes, strict=False)
        if step.rung == rung
    ]
    sign = -1.0 if rules.mode == "max" else 1.0
    whole = [(value * sign, trial) for value, trial in finished if value is not None]
    return [trial for _, trial in sorted(whole)[: max(at_least, len(finished) // rules.factor)]]


def rungs(epochs: int, factor: int) -> tuple[int, ...]:
    """Epochs after which trials are compared: all, divided by `factor` repeatedly.

    Example:
        >>> rungs(9, 3)
        (1, 3, 9)
        >>> rungs(20, 4)
        (1, 5, 20)
    """
    found = [epochs]
    while found[-1] >= factor:
        found.append(found[-1] // factor)
    return tuple(reversed(found))
