"""`flambeau doctor` for a script: watch it, find what it waits for, try what would help."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flambeau.errors import InputError
from flambeau.tune.doctor.answer import Answer, Table
from flambeau.tune.doctor.causes import Findings, findings_of
from flambeau.tune.doctor.formatting import Cause, graph_breaks_line, percent, reasons_in_full
from flambeau.tune.doctor.machine_watch import BUSY
from flambeau.tune.doctor.remedies import remedies_for
from flambeau.tune.doctor.remedy_trials import Tried, causes_after_trials, try_remedies
from flambeau.tune.doctor.shares import PHASES, shares_of
from flambeau.tune.doctor.trial import Script, Trial
from flambeau.tune.watch.plan import Plan

_RANKS = 8  # up to so many ranks get a column of their own; chosen


@dataclass(frozen=True)
class Options:
    """How long to watch, and how much to try.

    Attributes:
        trace: file for a time line of some steps.
    """

    seconds: float = 8.0
    steps: int = 20
    rounds: int = 3
    budget_s: float = 300.0
    trace: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The causes after the trials, the most important first, and what was tried."""

    findings: Findings
    causes: tuple[Cause, ...]
    tried: tuple[Tried, ...]
    alone_per_s: float | None

    @property
    def others_cpus(self) -> float:
        """How many CPUs other processes kept busy meanwhile, which makes figures noisy."""
        machine = self.findings.trial.machine
        return 0.0 if machine is None else machine.others_cpus

    @property
    def notes(self) -> list[str]:
        lines = [graph_breaks_line(self.findings.trial.trainers[0])]
        if self.others_cpus > BUSY:
            lines.append(
                f"Other processes kept {self.others_cpus:.1f} CPUs busy meanwhile: look again when the "
                "machine is quiet."
            )
        if reason := self.findings.trial.inside_because:
            lines.append(
                f"Stacks were read from inside: {reason}. Time in C code that is no call, such as "
                "table[index], may show at the next line."
            )
        if self.alone_per_s is not None:
            lines.append(f"The loader alone gives {self.alone_per_s:.4g} batches per second.")
        return [line for line in lines if line]

    @property
    def verdict(self) -> str:
        """One line: what the script waits for, and what helps most."""
        if not self.causes:
            return "nothing takes longer than it must"
        text = self.causes[0].text
        faster = [
            (one.gain.times, one.remedy.name)
            for one in self.tried
            if one.gain is not None and one.gain.verdict == "faster" and not one.remedy.is_bound
        ]
        if faster:
            times, name = max(faster, key=lambda pair: pair[0])
            text += f"; {name} makes it {times:.2f} times as fast (measured)"
        return text

    def as_json(self) -> dict[str, Any]:
        trial = self.findings.trial
        first = trial.trainers[0]
        return {
            "verdict": self.verdict,
            "steps": first["steps"],
            "step_s": trial.step_s,
            "processes": len(trial.trainers),
            "workers": first["loader"].get("num_workers", 0),
            "threads": first["threads"],
            "graphs": first["graphs"],
            "graphs_in_window": first["graphs_in_window"],
            "graph_breaks": first["graph_breaks"],
            "device": first["device"],
            "others_cpus": self.others_cpus,
            "peers": [] if trial.machine is None else sorted(trial.machine.peers),
            "shares": self.findings.shares,
            "ranks": [{"rank": one["rank"], "shares": shares_of(one)} for one in trial.trainers],
            "data": {
                "shares": self.findings.work.shares,
                "idle": self.findings.work.idle,
                "blocked": self.findings.work.blocked,
                "batches_per_s_alone": self.alone_per_s,
            },
            "causes": [dataclasses.asdict(cause) for cause in self.causes],
            "remedies": [_remedy_as_json(one) for one in self.tried],
        }


def answer_of(diagnosis: Diagnosis) -> Answer:
    trial = diagnosis.findings.trial
    first = trial.trainers[0]
    workers = first["loader"].get("num_workers")
    about = (
        f"{first['steps']} steps of {1000 * trial.step_s:.3g} ms watched: "
        f"{f'{len(trial.trainers)} processes, ' * (len(trial.trainers) > 1)}"
        f"{'' if workers is None else f'{workers} workers, '}{first['threads']} threads, {first['device']}"
    )
    parts: list[Table | str] = [_table_of_shares(diagnosis)]
    if len(diagnosis.causes) > 1:
        parts += ["Also:", *(f"- {cause.text}" for cause in diagnosis.causes[1:])]
    if diagnosis.tried:
        order = sorted(diagnosis.tried, key=lambda one: -one.gain.times if one.gain else 0.0)
        heads = ("change", "predicted", "measured", "", "how")
        parts.append(Table(heads, tuple(map(_row, order))))
        parts += reasons_in_full(
            (o.remedy.name, o.failure) for o in diagnosis.tried if o.gain is None
        )
    verdict = f"{diagnosis.verdict[0].upper()}{diagnosis.verdict[1:]}."
    return Answer(about, verdict, (*parts, *diagnosis.notes), diagnosis.as_json())


def _table_of_shares(diagnosis: Diagnosis) -> Table:
    """The mean shares, and those of each rank if there are few."""
    trainers = diagnosis.findings.trial.trainers
    shares = {"share": diagnosis.findings.shares}
    if 1 < len(trainers) <= _RANKS:
        shares |= {f"rank {one['rank']}": shares_of(one) for one in trainers}
    rows = [
        (phase, *(percent(each[phase]) for each in shares.values()))
        for phase in PHASES
        if any(each[phase] >= 0.005 for each in shares.values())
    ]
    return Table(("of a step", *shares), tuple(rows), numbers=len(shares))


def _row(one: Tried) -> tuple[str, ...]:
    predicted = f"{'at most ' * one.remedy.at_most}{one.remedy.predicted:.2f}x"
    if one.gain is None:
        return one.remedy.name, predicted, "-", one.failure.partition("\n")[0], one.remedy.how
    return one.remedy.name, predicted, f"{one.gain.times:.2f}x", one.gain.verdict, one.remedy.how


def _remedy_as_json(one: Tried) -> dict[str, Any]:
    gain = one.gain
    return {
        "name": one.remedy.name,
        "how": one.remedy.how,
        "predicted": one.remedy.predicted,
        "at_most": one.remedy.at_most,
        "is_bound": one.remedy.is_bound,
        "measured": None if gain is None else gain.times,
        "low": None if gain is None or gain.low != gain.low else gain.low,
        "verdict": one.failure.partition("\n")[0] if gain is None else gain.verdict,
        "failure": one.failure,
    }


def diagnose(script: Script, options: Options, *, say: Callable[[str], None]) -> Diagnosis:
    """Watch a script, and try what would help; InputError: it makes no steps, or cannot be started."""
    say("watching the script as it is")
    watched = Plan(seconds=options.seconds, steps=options.steps, trace=options.trace)
    trial = script.run(watched)
    if trial.failure is not None:
        raise InputError(trial.failure)
    trial = watched_on_one_thread(script, watched, trial, say=say)
    findings = findings_of(trial)
    if not options.rounds:
        return Diagnosis(findings, findings.causes, (), None)
    # The compared runs are shorter, and no stack is sampled in them.
    plan = Plan(
        watches=False,
        warmup_steps=5,
        warmup_s=1.5,
        steps=min(10, options.steps),
        seconds=options.seconds / 2,
    )
    alone = None
    if findings.shares["data"] >= 0.05 and trial.trainers[0]["loader"]:
        say(f"waits for data {percent(findings.shares['data'])} of the time: reading them alone")
        change = {"alone": plan.seconds}
        alone = script.run(dataclasses.replace(plan, change=change)).alone_per_s
    tried = try_remedies(
        script,
        remedies_for(findings),
        plan,
        rounds=options.rounds,
        enough_s=options.budget_s,
        say=say,
    )
    was_busy = trial.machine is not None and trial.machine.others_cpus > BUSY
    causes = causes_after_trials(findings.causes, tried, was_busy=was_busy)
    return Diagnosis(findings, tuple(causes), tuple(tried), alone)


def watched_on_one_thread(
    script: Script, plan: Plan, trial: Trial, *, say: Callable[[str], None]
) -> Trial:
    """On a busy machine, watch once more on one thread, and take the samples from that run.

    Threads that compute together wait for each other: one without a CPU holds up all, so computing slows down
    far more than the rest. On one thread all parts slow down alike.
    """
    others = 0.0 if trial.machine is None else trial.machine.others_cpus
    first = trial.trainers[0]
    if others < BUSY or first["device"] != "cpu" or first["threads"] == 1:
        return trial
    say(f"other programs keep {others:.1f} CPUs busy: watching once more, on one thread")
    again = script.run(dataclasses.replace(plan, change={"threads": 1}, trace=None))
    if len(again.trainers) != len(trial.trainers):
        return trial
    pairs = zip(trial.trainers, again.trainers, strict=True)
    trainers = [with_samples_of(*pair) | {"one_thread_step_s": pair[1]["step_s"]} for pair in pairs]
    return dataclasses.replace(trial, trainers=trainers)


def with_samples_of(trainer: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The clocks of one process with the samples and operations of another one; see `StepWatch`."""
    longer = trainer["seconds"] / other["seconds"]
    slower = trainer["step_s"] / other["step_s"]
    return trainer | {
        "seen": [[*row[:-1], row[-1] * longer] for row in other["seen"]],
        "waiting_calls": [
            [file, line, what, calls, seconds * slower, copied]
            for file, line, what, calls, seconds, copied in other.get("waiting_calls", ())
        ],
        "operations": other.get("operations", {}),
        "times": other.get("times", []),
    }
