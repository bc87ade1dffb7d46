"""`flambeau doctor` from top to bottom: watch a script, find what it waits for, try what would help."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flambeau.errors import InputError
from flambeau.tune.doctor.answer import Answer, Table
from flambeau.tune.doctor.causes import Findings, findings_of
from flambeau.tune.doctor.formatting import Cause, graph_breaks_line, percent, reasons_in_full
from flambeau.tune.doctor.remedies import remedies_for
from flambeau.tune.doctor.remedy_trials import Tried, told_by_trials, try_remedies
from flambeau.tune.doctor.shares import PHASES, shares_of
from flambeau.tune.doctor.trial import Script, Trial
from flambeau.tune.watch.plan import Plan

_RANKS = 8  # whose shares are shown one beside the other; chosen
_BUSY = 0.25  # CPUs that other programs keep busy, from which on they are worth a word; chosen


@dataclass(frozen=True)
class Options:
    """How long is looked, and how much is tried.

    Attributes:
        seconds: of the watched window, at least.
        steps: of it, at least, unless four times the seconds are over.
        rounds: pairs of runs per change; 0 tries none.
        budget_s: after which no new trial begins.
        trace: where a time line of some steps goes; None for none.
    """

    seconds: float = 8.0
    steps: int = 20
    rounds: int = 3
    budget_s: float = 300.0
    trace: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """What was found.

    Attributes:
        findings: of the watched run.
        causes: what the time goes to, the first one first, after the trials.
        tried: what was changed, with the gain.
        alone_per_s: batches per second of the loader alone; None where it was not asked.
    """

    findings: Findings
    causes: tuple[Cause, ...]
    tried: tuple[Tried, ...]
    alone_per_s: float | None

    @property
    def others_cpus(self) -> float:
        """How many CPUs other processes have kept busy meanwhile, which makes figures noisy."""
        machine = self.findings.trial.machine
        return 0.0 if machine is None else machine.others_cpus

    @property
    def peers(self) -> list[str]:
        """To whom the script was connected over the network, as far as that was seen."""
        machine = self.findings.trial.machine
        return [] if machine is None else sorted(machine.peers)

    @property
    def was_busy(self) -> bool:
        """Whether they have kept enough of them busy to say so."""
        return self.others_cpus > _BUSY

    @property
    def notes(self) -> list[str]:
        """What there is to know besides, in sentences."""
        found = [graph_breaks_line(self.findings.trial.trainers[0])]
        if self.was_busy:
            found.append(
                f"Other processes kept {self.others_cpus:.1f} CPUs busy meanwhile: look again when the "
                "machine is quiet."
            )
        if self.alone_per_s is not None:
            found.append(f"The loader alone gives {self.alone_per_s:.4g} batches per second.")
        return [line for line in found if line]

    @property
    def verdict(self) -> str:
        """One line: what it waits for, and what helps most."""
        if not self.causes:
            return "nothing takes longer than it must"
        text = self.causes[0].text
        helps = [
            one
            for one in self.tried
            if one.gain is not None and one.gain.verdict == "faster" and not one.remedy.is_bound
        ]
        if helps:
            best = max(helps, key=lambda one: one.gain.times if one.gain else 0.0)
            assert best.gain is not None
            text += f"; {best.remedy.name} makes it {best.gain.times:.2f} times as fast (measured)"
        return text

    def as_json(self) -> dict[str, Any]:
        """For a program."""
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
            "peers": self.peers,
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


def answer_of(found: Diagnosis) -> Answer:
    """As it is shown."""
    trial = found.findings.trial
    first = trial.trainers[0]
    workers = first["loader"].get("num_workers")
    about = (
        f"{first['steps']} steps of {1000 * trial.step_s:.3g} ms watched: "
        f"{f'{len(trial.trainers)} processes, ' * (len(trial.trainers) > 1)}"
        f"{'' if workers is None else f'{workers} workers, '}{first['threads']} threads, {first['device']}"
    )
    parts: list[Table | str] = [_table_of_shares(found)]
    if len(found.causes) > 1:
        parts += ["Also:", *(f"- {cause.text}" for cause in found.causes[1:])]
    if found.tried:
        order = sorted(found.tried, key=lambda one: -one.gain.times if one.gain else 0.0)
        heads = ("change", "predicted", "measured", "", "how")
        parts.append(Table(heads, tuple(map(_row, order))))
        parts += reasons_in_full((o.remedy.name, o.failure) for o in found.tried if o.gain is None)
    verdict = f"{found.verdict[0].upper()}{found.verdict[1:]}."
    return Answer(about, verdict, (*parts, *found.notes), found.as_json())


def _table_of_shares(found: Diagnosis) -> Table:
    """On average, and of some ranks each for itself."""
    trainers = found.findings.trial.trainers
    shares = {"share": found.findings.shares}
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
    """Watch a script, and try what would help.

    Args:
        script: what is to be watched.
        options: how long.
        say: takes lines on what goes on.

    Raises:
        InputError: the script makes no steps, or cannot be started.
    """
    say("watching the script as it is")
    watched = Plan(seconds=options.seconds, steps=options.steps, trace=options.trace)
    trial = script.run(watched)
    if trial.failure is not None:
        raise InputError(trial.failure)
    trial = watched_on_one_thread(script, watched, trial, say=say)
    findings = findings_of(trial)
    if not options.rounds:
        return Diagnosis(findings, findings.causes, (), None)
    plan = _short(options)
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
    was_busy = trial.machine is not None and trial.machine.others_cpus > _BUSY
    causes = told_by_trials(findings.causes, tried, was_busy=was_busy)
    return Diagnosis(findings, tuple(causes), tuple(tried), alone)


def _short(options: Options) -> Plan:
    """Of the runs that are compared: shorter, and nobody looks at stacks."""
    return Plan(
        watches=False,
        warmup_steps=5,
        warmup_s=1.5,
        steps=min(10, options.steps),
        seconds=options.seconds / 2,
    )


def watched_on_one_thread(
    script: Script, plan: Plan, trial: Trial, *, say: Callable[[str], None]
) -> Trial:
    """A watched run as it was, but what was seen in it comes from another one, if the machine was busy.

    Threads that compute together wait for each other: one that has no CPU holds up all of them, so what they
    compute becomes many times as long while the rest of a step becomes somewhat longer. On one thread all
    parts become longer alike, and their shares are nearly those on a machine that is quiet.

    Args:
        script: that was watched.
        plan: by which it was watched.
        trial: what came of it.
        say: takes a line that tells of it.
    """
    others = 0.0 if trial.machine is None else trial.machine.others_cpus
    first = trial.trainers[0]
    if others < _BUSY or first["device"] != "cpu" or first["threads"] == 1:
        return trial
    say(f"other programs keep {others:.1f} CPUs busy: watching once more, on one thread")
    again = script.run(dataclasses.replace(plan, change={"threads": 1}, trace=None))
    if len(again.trainers) != len(trial.trainers):
        return trial
    pairs = zip(trial.trainers, again.trainers, strict=True)
    return dataclasses.replace(trial, trainers=[with_looks_of(*pair) for pair in pairs])


def with_looks_of(trainer: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """A process with its own clocks, in which the looks and operations of another one were seen.

    Args:
        trainer: whose steps and waiting were clocked; see `StepWatch`.
        other: in which was looked.
    """
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
