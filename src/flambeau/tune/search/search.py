"""The search: one lever after the other, accepted only if it is surely better than the choice so far."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flambeau.tune.doctor.machine_watch import BUSY
from flambeau.tune.doctor.paired_test import Gain, gain_of
from flambeau.tune.search.levers import Choice, Lever, Setting

_HOPELESS = 1.01  # a first pair below this is not repeated; chosen
_WORSE = 0.9  # a value with a smaller gain ends a lever's list; chosen


@dataclass(frozen=True)
class Measured:
    """The figures of one trial.

    Attributes:
        cost: seconds per step, or bytes, to minimize; None if the trial failed.
        start_s: seconds until the steps were timed.
        losses: means of ten steps each from the start, if known.
        others_cpus: CPUs that other programs kept busy.
    """

    cost: float | None
    start_s: float = 0.0
    losses: tuple[float, ...] = ()
    failure: str = ""
    others_cpus: float = 0.0


@dataclass(frozen=True)
class Step:
    """One value of a lever that was tried.

    Attributes:
        gain: against the choice so far; None if failed or refused.
        alone: against no lever at all; of a chosen value, unless the first, measured at the end.
    """

    lever: str
    value: str
    gain: Gain | None
    note: str = ""
    is_chosen: bool = False
    alone: Gain | None = None


@dataclass(frozen=True)
class SearchResult:
    """What the search has chosen.

    Attributes:
        together: gain of the whole choice against none; None if nothing is chosen or no time was left.
    """

    choice: dict[str, str]
    settings: tuple[Setting, ...]
    steps: tuple[Step, ...]
    together: Gain | None


Measure = Callable[[Choice], Measured]
"""Runs a trial."""


class Search:
    """Tries levers in turn.

    Args:
        is_over: no time is left for so many trials; then no comparison begins.
        left_s, loss_bound: as `planned_s` and `loss_bound` of `Options`.
    """

    def __init__(
        self,
        measure: Measure,
        *,
        rounds: int,
        is_over: Callable[[int], bool],
        left_s: float,
        loss_bound: float,
    ) -> None:
        self._measure, self._rounds, self._is_over = measure, rounds, is_over
        self._left_s, self._loss_bound = left_s, loss_bound
        self._newest: tuple[Choice, Measured] | None = None
        self._reference: Choice = {}
        self._reference_losses: tuple[float, ...] | None = None
        self._others_cpus = 0.0  # the most in a trial of the newest comparison

    def run(self, levers: Sequence[Lever], *, first: Measured) -> SearchResult:
        """Search lever by lever, then repeat what may be better in twice as many pairs."""
        choice: dict[str, str] = {}
        self._newest = {}, first
        self._reference = {one.name: one.reference.value for one in levers if one.reference}
        self._reference_losses = None if self._reference else first.losses
        steps: list[Step] = []
        for lever in levers:
            tried = self._try_lever(lever, choice)
            better = [one for one in tried if one.gain is not None and one.is_chosen]
            if better:
                best = max(better, key=lambda one: one.gain.times if one.gain else 0.0)
                choice[lever.name] = best.value
                tried = [replace(one, is_chosen=one is best) for one in tried]
            steps += tried
        steps = self._repeat_uncertain(levers, steps, choice)
        together = None
        if choice and not self._is_over(0):
            together = self._compare({}, choice, patient_rounds=self._rounds)[0]
        if together is not None and together.times < 1.0:  # the tests have accepted noise
            choice = {}
        steps = [self._with_alone(one, choice) for one in steps]
        known = {lever.name: lever for lever in levers}
        settings = tuple(known[name].setting(value) for name, value in choice.items())
        return SearchResult(choice, settings, tuple(steps), together)

    def _with_alone(self, step: Step, choice: Choice) -> Step:
        """Measure what a chosen value gives without the other chosen ones."""
        if choice.get(step.lever) != step.value:
            return replace(step, is_chosen=False)
        if step.alone is not None or self._is_over(0):
            return step
        return replace(step, alone=self._compare({}, {step.lever: step.value})[0])

    def _try_lever(self, lever: Lever, choice: Choice) -> list[Step]:
        steps: list[Step] = []
        for setting in lever.settings:
            if self._is_over(0):
                steps.append(Step(lever.name, setting.value, None, "no time was left"))
                continue
            steps.append(step := self._try_setting(lever, setting, choice))
            if step.gain is not None and step.gain.times < _WORSE and len(steps) > 1:
                break
        return steps

    def _try_setting(
        self, lever: Lever, setting: Setting, choice: Choice, *, patient_rounds: int | None = None
    ) -> Step:
        """On top of a choice; `is_chosen` says whether the value may be chosen."""
        other = {**choice, lever.name: setting.value}
        gain, base, tried = self._compare(choice, other, patient_rounds=patient_rounds)
        note = self._objection(lever, setting, gain, base, tried)
        is_better = gain is not None and gain.verdict == "faster" and not note
        return Step(lever.name, setting.value, gain, note, is_better, None if choice else gain)

    def _repeat_uncertain(
        self, levers: Sequence[Lever], steps: Sequence[Step], choice: dict[str, str]
    ) -> list[Step]:
        """Repeat promising but uncertain steps; returns all steps and adds to the choice."""
        known = {lever.name: lever for lever in levers}
        updated = list(steps)

        def promise(number: int) -> float:
            gain = updated[number].gain
            is_open = gain is not None and gain.verdict == "no difference seen"
            return gain.times if gain and is_open and not updated[number].note else 0.0

        needed = 6 * self._rounds  # 4 for the pairs here, 2 for the whole choice at the end
        for number in sorted(range(len(updated)), key=promise, reverse=True):
            name = updated[number].lever
            if promise(number) < _HOPELESS or name in choice or self._is_over(needed):
                continue
            setting = known[name].setting(updated[number].value)
            step = self._try_setting(known[name], setting, choice, patient_rounds=2 * self._rounds)
            if step.gain is not None:
                updated[number] = step
            if step.is_chosen:
                choice[name] = step.value
        return updated

    def _objection(
        self, lever: Lever, setting: Setting, gain: Gain | None, base: Measured, tried: Measured
    ) -> str:
        """Why a value is not taken although it may be better; '' if nothing speaks against it."""
        if gain is None:
            return tried.failure or base.failure
        if gain.times > 1 and self._others_cpus > BUSY:
            # Threads that wait for each other are then held up most, so that fewer seem faster.
            return f"not judged: other programs kept {self._others_cpus:.1f} CPUs busy"
        if setting.advice:
            per_sample = "per sample, " if setting.samples != 1 else ""
            return f"{per_sample}{gain.verdict}; {setting.advice}"
        may_differ = lever.is_rounding and setting != lever.reference
        if may_differ and gain.verdict == "faster" and tried.losses:
            full = self._losses_in_full_precision() or base.losses
            count = min(len(full), len(tried.losses))  # a slow trial ends after fewer steps
            was, now = math.fsum(full[:count]), math.fsum(tried.losses[:count])
            off = abs(now - was) / max(abs(was), 1e-9)
            if not off <= self._loss_bound:
                other = "in fp32" if self._reference else "of the run as it is"
                return (
                    f"refused: the loss of the first steps differs by {off:.0%} from that {other}"
                )
        if lever.costs_start and gain.times > 1:
            extra = tried.start_s - base.start_s
            saved = self._left_s * (1 - 1 / gain.times)
            if extra > saved:
                return f"takes {extra:.0f} s longer to start, and saves {saved:.0f} s of the planned run"
        return ""

    def _losses_in_full_precision(self) -> tuple[float, ...]:
        """From one trial, run only for this."""
        if self._reference_losses is None:
            self._reference_losses = self._measure(self._reference).losses
        return self._reference_losses

    def _compare(
        self, base: Choice, other: Choice, *, patient_rounds: int | None = None
    ) -> tuple[Gain | None, Measured, Measured]:
        """Alternate trials without and with; the newest trial without is reused.

        Without a gain the first pair remains the only one, unless `patient_rounds` gives their number; what
        is far worse is not compared with a second trial without it.
        """
        pairs: list[tuple[float, float]] = []
        before = self._measured(base)
        tried = before
        self._others_cpus = before.others_cpus
        for _ in range(patient_rounds or self._rounds):
            tried = self._measure(other)
            self._others_cpus = max(self._others_cpus, tried.others_cpus)
            if _is_far_worse(before, tried) and not (pairs or patient_rounds):
                pairs.append((before.cost or 0.0, tried.cost or 0.0))
                break
            after = self._measure(base)
            self._newest = base, after
            self._others_cpus = max(self._others_cpus, after.others_cpus)
            if before.cost is None or tried.cost is None or after.cost is None:
                break
            pairs.append(((before.cost * after.cost) ** 0.5, tried.cost))
            before = after
            is_hopeless = pairs[0][0] / pairs[0][1] < _HOPELESS and not patient_rounds
            if is_hopeless or self._is_over(0):
                break
        if not pairs:
            return None, before, tried
        costs, others = zip(*pairs, strict=True)
        return gain_of(costs, others), before, tried

    def _measured(self, choice: Choice) -> Measured:
        if self._newest is not None and self._newest[0] == choice:
            return self._newest[1]
        return self._measure(choice)


def _is_far_worse(before: Measured, tried: Measured) -> bool:
    if before.cost is None or tried.cost is None:
        return False
    return before.cost < _WORSE * tried.cost
