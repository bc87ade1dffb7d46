"""`flambeau doctor --learning`: watch the first steps of a script, and say why it may not learn."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flambeau.errors import InputError
from flambeau.tune.doctor.answer import Answer
from flambeau.tune.doctor.formatting import shown
from flambeau.tune.doctor.trial import Script
from flambeau.tune.learning import data_checks, loss_checks, update_checks
from flambeau.tune.learning.finding import SURE, Check, Finding, Seen, place
from flambeau.tune.watch.plan import Plan

CHECKS: tuple[Check, ...] = (
    *loss_checks.CHECKS,
    *update_checks.CHECKS,
    *data_checks.CHECKS,
)
_SHARE = 0.9  # of --limit, until when a training with long steps is watched; chosen


def watch(script: Script, *, steps: int, seconds: float, say: Callable[[str], None]) -> Answer:
    """Run a script for so many steps; InputError: it does not train, or cannot be started."""
    say("watching what the script learns from")
    end = time.time() + _SHARE * script.limit_s
    trial = script.run(Plan(watches=False, steps=steps, seconds=seconds, learning=True, end=end))
    if trial.failure is not None:
        raise InputError(trial.failure)
    return answer_of([one["learning"] for one in trial.trainers], crash=trial.crash)


def findings_of(processes: Sequence[Seen]) -> list[Finding]:
    """Of all processes, the surest and most harmful first; each kind and line once."""
    found: dict[tuple[str, str], Finding] = {}
    for seen in processes:
        for check in CHECKS:
            for one in check(seen):
                found.setdefault((one.kind, one.where), one)
    for one in same_samples(processes):
        found.setdefault((one.kind, one.where), one)
    if all(one.sure == "look" for one in found.values()):
        found |= {(one.kind, one.where): one for one in update_checks.by_heart(processes[0])}
    return sorted(found.values(), key=lambda one: (SURE.index(one.sure), -one.harm, one.where))


def same_samples(processes: Sequence[Seen]) -> list[Finding]:
    """Whether two ranks of one job read the same samples in their first epoch."""
    for first, second in itertools.combinations(processes, 2):
        if _shares_data(first) != _shares_data(second) or first["world"] == 1 or first["is_split"]:
            continue
        samples = [*_first_epoch(first)]
        others = [*_first_epoch(second)]
        different = {*samples}
        twice = len(different & {*others})
        has_many = len(different) >= 0.5 * len(samples) > 0  # else contents are equal by chance
        if not has_many or twice < 0.9 * len(different):
            continue
        at_once = sum(one == other for one, other in zip(samples, others, strict=False))
        # Ranks may also draw at random from all samples, each on its own.
        sure = "certain" if at_once >= 0.9 * len(samples) else "look"
        loader = next(one for one in first["loaders"] if one["trained"])
        text = (
            f"{twice} of {len(different)} samples of the first epoch of a rank are another's, too"
        )
        text += f"; {at_once} of them at the same time"
        change = "use DistributedSampler, or give each rank its part of an IterableDataset"
        return [Finding("ranks repeat samples", sure, text, change, place(loader), harm=1)]
    return []


def _shares_data(seen: Seen) -> tuple[str, int, list[str]]:
    """Equal in replicas of one job: parts of a pipeline have other parameters, and read the same data."""
    return seen["job"], seen["world"], [row["name"] for row in seen["parameters"]]


def _first_epoch(seen: Seen) -> Iterator[int]:
    return itertools.chain.from_iterable(
        one["first_epoch"] for one in seen["loaders"] if one["trained"]
    )


def answer_of(processes: Sequence[Seen], *, crash: str = "") -> Answer:
    findings = findings_of(processes)
    steps = max(seen["optimizer_steps"] or seen["backwards"] for seen in processes)
    first = processes[0]["losses"]
    about = f"{steps} steps watched"
    if first:
        about += f": loss {first[0]:.4g} at the first, {first[-1]:.4g} at the last"
    verdict = f"Nothing suspicious was found in {steps} steps."
    if crash:
        verdict += f" Then {crash}"
    if findings:
        verdict = _sentence(findings[0])
    data: dict[str, Any] = {
        "verdict": verdict,
        "steps": steps,
        "processes": len(processes),
        "losses": first,
        "crash": crash or None,
        "findings": [dataclasses.asdict(one) for one in findings],
    }
    lines = _lines(findings) + ([_capital(crash)] if crash and findings else [])
    return Answer(about, verdict, tuple(lines), data)


def _sentence(one: Finding) -> str:
    where = f"{shown(one.where)}: " if one.where else ""
    return f"{where}{one.text} ({one.sure})."


def _lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for number, one in enumerate(findings, 1):
        rule = f"; flambeau lint rule {one.rule}" if one.rule else ""
        lines.append(f"{number}. {_sentence(one)}")
        lines.append(f"   {_capital(one.change)}{rule}.")
    return lines


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
