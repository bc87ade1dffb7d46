"""What each remedy gives, measured in pairs of runs, and what that says about the causes."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flambeau.tune.doctor.causes import in_order
from flambeau.tune.doctor.formatting import Cause
from flambeau.tune.doctor.paired_test import Gain, gain_of
from flambeau.tune.doctor.remedies import Remedy
from flambeau.tune.doctor.trial import Script
from flambeau.tune.watch.code_origin import in_package
from flambeau.tune.watch.plan import Plan

_NO_HOPE = 1.01  # after a first pair below this, no second one
_CLEAR = 1.5  # a gain that needs no test if each pair shows it; chosen
_SOME = 1.1  # a smaller mean gain refutes a cause even on a busy machine; chosen
_FIRST_SHARE = 0.6  # of the time, for first pairs; the rest repeats those with a gain; chosen
_CONFIRMED_BY_TRIALS = ("threads", "many workers", "debug mode")
_READERS = ("read", "decode", "transform", "collate")
_TEXTS = {
    "threads": "more threads run than there are CPUs, and wait for each other",
    "many workers": "there are more workers than CPUs to run them",
}


@dataclass(frozen=True)
class Tried:
    """A remedy and its measured gain; `gain` is None if it was not measured, for the reason in `failure`."""

    remedy: Remedy
    gain: Gain | None
    failure: str = ""


def try_remedies(
    script: Script,
    remedies: Sequence[Remedy],
    plan: Plan,
    *,
    rounds: int,
    enough_s: float,
    say: Callable[[str], None],
) -> list[Tried]:
    """Run the script with each remedy, the most promising first, between two runs without it.

    Without gain in the first pair there is no other. After `enough_s` no trial begins, and no first pair late
    in it.
    """
    start = time.monotonic()
    pairs: dict[str, list[tuple[float, float]]] = {one.name: [] for one in remedies}
    failures = {one.name: one.refused for one in remedies if one.refused}
    before = None
    for number in range(rounds):
        share = _FIRST_SHARE if number == 0 < rounds - 1 else 1.0
        # Repeat the largest gains first: they most need to be certain.
        for remedy in sorted(remedies, key=lambda one: -_best_gain(pairs[one.name])):
            hopeless = number and _best_gain(pairs[remedy.name]) < _NO_HOPE
            late = time.monotonic() > start + share * enough_s
            if remedy.name in failures or hopeless or late:
                continue
            say(f"trying {remedy.name}, {number + 1} of {rounds}")
            if before is None:
                before = script.run(plan)
            changed = dataclasses.replace(plan, change=remedy.change)
            with_it = script.run(changed)
            after = script.run(plan)
            if with_it.failure is not None:
                failures[remedy.name] = with_it.failure
            elif before.failure is None and after.failure is None:
                # The mean of the runs before and after cancels a slow drift of the machine.
                base = math.sqrt(before.step_s * after.step_s)
                pairs[remedy.name].append((base, with_it.step_s))
            before = after
    return [
        _tried(remedy, pairs[remedy.name], failures.get(remedy.name, "")) for remedy in remedies
    ]


def _best_gain(pairs: Sequence[tuple[float, float]]) -> float:
    """The largest gain of a remedy so far; 0 if it has not been tried."""
    return max((base / with_it for base, with_it in pairs), default=0.0)


def _tried(remedy: Remedy, pairs: Sequence[tuple[float, float]], failure: str) -> Tried:
    if failure or not pairs:
        return Tried(remedy, None, failure or "no time was left")
    before, after = zip(*pairs, strict=True)
    return Tried(remedy, gain_of(before, after))


def causes_after_trials(
    causes: Sequence[Cause], tried: Sequence[Tried], *, was_busy: bool = False
) -> list[Cause]:
    """Causes of the watched run, corrected by the trials: what helps is what was slow.

    On a busy machine one pair of runs refutes nothing: other programs take more CPU time from fewer threads.
    """
    updated = list(causes)
    measured = []
    for one in tried:
        if one.gain is None or one.remedy.is_bound or not _is_clear(one.gain):
            continue
        share = 1 - 1 / one.gain.times
        kind = one.remedy.kind
        if kind in _CONFIRMED_BY_TRIALS:
            text = next((c.text for c in updated if c.kind == kind), _TEXTS.get(kind, ""))
            updated = [c for c in updated if c.kind != kind]
            measured.append(Cause(kind, share, "", text))
        elif kind == "few workers":
            waits = next((c for c in updated if c.kind in _READERS), None)
            if waits is not None and share >= waits.share / 2:
                # The user can rewrite their own line, so it stays the cause.
                kind = kind if in_package(waits.where) else waits.kind
                text = f"{waits.text}; more workers help"
                updated[updated.index(waits)] = Cause(kind, waits.share, waits.where, text)
    # Measured causes slow down everything else, so they come first; refuted ones come last.
    refuted = {
        one.remedy.kind
        for one in tried
        if one.gain is not None
        and _refutes(one.gain, was_busy=was_busy)
        and one.remedy.kind in _CONFIRMED_BY_TRIALS
    }
    rest = in_order([c for c in updated if c.kind not in refuted])
    return in_order(measured) + rest + [c for c in updated if c.kind in refuted]


def _is_clear(gain: Gain) -> bool:
    """Faster by the test; or by more than any noise in each pair, as the test is weak for a few pairs."""
    return gain.verdict == "faster" or gain.least >= _CLEAR


def _refutes(gain: Gain, *, was_busy: bool) -> bool:
    if _is_clear(gain):
        return False
    if was_busy:  # pairs differ so much that the test says nothing
        return gain.is_tested and gain.times < _SOME
    return gain.is_tested or gain.times < _NO_HOPE
