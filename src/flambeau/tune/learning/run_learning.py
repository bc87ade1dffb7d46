"""`flambeau doctor --learning`: watch the first steps of a script, and say why it may not learn."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from flambeau.errors import InputError
from flambeau.tune.doctor.answer import Answer
from flambeau.tune.doctor.formatting import shown
from flambeau.tune.doctor.trial import Script
from flambeau.tune.learning import course_checks, data_checks, loss_checks, update_checks
from flambeau.tune.learning.finding import SURE, Check, Finding, Seen
from flambeau.tune.watch.plan import Plan

CHECKS: tuple[Check, ...] = (
    *loss_checks.CHECKS,
    *course_checks.CHECKS,
    *update_checks.CHECKS,
    *data_checks.CHECKS,
)


def watch(script: Script, *, steps: int, seconds: float, say: Callable[[str], None]) -> Answer:
    """Run a script for so many steps; InputError: it does not train, or cannot be started."""
    say("watching what the script learns from")
    trial = script.run(Plan(watches=False, steps=steps, seconds=seconds, change={"learning": True}))
    if trial.failure is not None:
        raise InputError(trial.failure)
    return answer_of([one["learning"] for one in trial.trainers])


def findings_of(processes: Sequence[Seen]) -> list[Finding]:
    """Of all processes, the surest and most harmful first; each kind and line once."""
    found: dict[tuple[str, str], Finding] = {}
    for seen in processes:
        for check in CHECKS:
            for one in check(seen):
                found.setdefault((one.kind, one.where), one)
    for one in same_samples(processes):
        found.setdefault((one.kind, one.where), one)
    return sorted(found.values(), key=lambda one: (SURE.index(one.sure), -one.harm, one.where))


def same_samples(processes: Sequence[Seen]) -> list[Finding]:
    """Whether two ranks train on the same samples."""
    hashes = [
        {sample for loader in seen["loaders"] if loader["trained"] for sample in loader["hashes"]}
        for seen in processes
    ]
    if len(hashes) < 2 or not hashes[0]:
        return []
    twice = len(hashes[0] & hashes[1])
    if twice < 0.9 * len(hashes[0]):
        return []
    loader = next(one for one in processes[0]["loaders"] if one["trained"])
    return [
        Finding(
            "ranks repeat samples",
            "certain",
            f"{twice} of {len(hashes[0])} samples of the first process are those of the second",
            "use DistributedSampler",
            f"{loader['file']}:{loader['line']}",
        )
    ]


def answer_of(processes: Sequence[Seen]) -> Answer:
    findings = findings_of(processes)
    steps = max(seen["optimizer_steps"] or seen["backwards"] for seen in processes)
    first = processes[0]["losses"]
    about = f"{steps} steps watched"
    if first:
        about += f": loss {first[0]:.4g} at the first, {first[-1]:.4g} at the last"
    verdict = f"Nothing suspicious was found in {steps} steps."
    if findings:
        verdict = _sentence(findings[0])
    data: dict[str, Any] = {
        "verdict": verdict,
        "steps": steps,
        "processes": len(processes),
        "losses": first,
        "findings": [dataclasses.asdict(one) for one in findings],
    }
    return Answer(about, verdict, tuple(_lines(findings)), data)


def _sentence(one: Finding) -> str:
    where = f"{shown(one.where)}: " if one.where else ""
    return f"{where}{one.text} ({one.sure})."


def _lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for number, one in enumerate(findings, 1):
        rule = f"; flambeau lint rule {one.rule}" if one.rule else ""
        lines.append(f"{number}. {_sentence(one)}")
        lines.append(f"   {one.change[0].upper()}{one.change[1:]}{rule}.")
    return lines
