"""What a sweep has found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Literal

from flambeau.experiments.importance import Importance
from flambeau.experiments.space import Value, shown
from flambeau.experiments.spread import Spread, no_difference_seen, spread_of
from flambeau.experiments.sweep_folder import SweepFolder
from flambeau.experiments.sweeper import Experiment, known_trials, outcomes
from flambeau.html_table import html_grid


@dataclass(frozen=True)
class Trial:
    """One choice of settings, and what came of it.

    Attributes:
        settings: those that the sweep chose.
        value: its figure, the mean over its runs; None if it failed, or has no result yet.
        values: its runs' figures at the last rung, by folds and seeds.
        spread: of these over folds (of means over seeds), or over seeds; None for one run.
        is_best_seen: trained to the end, and no difference from the best trial is seen, pair by pair; None
            for the best, one run, and trials stopped early.
        epochs: that its runs were trained.
        state: running, whole (trained to the end), halved (stopped after fewer epochs), or failed.
        reason: of a failure.
        runs: the folders of its runs.
    """

    number: int
    settings: Mapping[str, Value]
    value: float | None
    values: tuple[float, ...]
    spread: Spread | None
    epochs: int
    state: Literal["running", "whole", "halved", "failed"]
    reason: str | None
    runs: tuple[Path, ...]
    is_best_seen: bool | None = None

    @property
    def words(self) -> str:
        return " ".join(f"{name}={shown(value)}" for name, value in self.settings.items())


@dataclass(frozen=True)
class SweepResult:
    """The outcome of a sweep.

    Attributes:
        folder: of the sweep.
        figure: name of what was compared.
        trials: all, in their order.
        best: of those trained to the end, if any.
        is_over: nothing is left to train.
        importance: how much each searched setting matters, if asked for.
    """

    folder: Path
    figure: str
    trials: Sequence[Trial]
    best: Trial | None
    is_over: bool
    importance: Importance | None = None

    def _repr_html_(self) -> str:
        heads = ["trial", self.figure, "epochs", "state", "settings"]
        rows = [[t.number, t.value, t.epochs, t.state, t.words] for t in self.trials]
        return html_grid(heads, rows)


def result_of(folder: SweepFolder, experiment: Experiment, *, is_over: bool) -> SweepResult:
    """What sweep.jsonl says; the folder's records are not read again."""
    rules = experiment.rules
    known = known_trials(experiment, folder.records, len(folder.records.steps))
    trials = [
        _trial(folder, experiment, number, known[number].state) for number in range(len(known))
    ]
    whole = [trial for trial in trials if trial.state == "whole" and trial.value is not None]
    sign = -1 if rules.mode == "max" else 1
    best = min(whole, key=lambda trial: ((trial.value or 0.0) * sign, trial.number), default=None)
    if best is not None:
        trials = [_beside_best(trial, best, experiment) for trial in trials]
    return SweepResult(folder.path, experiment.figure, trials, best, is_over)


def _beside_best(trial: Trial, best: Trial, experiment: Experiment) -> Trial:
    if trial is best or best.spread is None or trial.state != "whole" or trial.value is None:
        return trial
    seen = no_difference_seen(
        by_fold(trial.values, experiment),
        by_fold(best.values, experiment),
        folds=experiment.folds > 0,
    )
    return replace(trial, is_best_seen=seen)


def by_fold(values: Sequence[float], experiment: Experiment) -> list[float]:
    """One figure per fold, the mean over its seeds; without folds one per seed."""
    count = len(experiment.members) // (experiment.folds or len(experiment.members))
    return [fmean(values[at : at + count]) for at in range(0, len(values), count)]


def _trial(
    folder: SweepFolder,
    experiment: Experiment,
    number: int,
    state: Literal["running", "whole", "halved", "failed"],
) -> Trial:
    records = folder.records
    members = experiment.members
    found = outcomes(records, len(members))
    steps = [step for step in records.steps if step.trial == number]
    done = [step for step in steps if step.step in found and found[step.step].value is not None]
    reasons = [
        result.reason
        for step in steps
        for member in range(len(members))
        if (result := records.results.get((step.step, member))) is not None and result.reason
    ]
    values: list[float] = []
    if done:
        results = [records.results[done[-1].step, member].value for member in range(len(members))]
        values = [value for value in results if value is not None]
    return Trial(
        number,
        records.settings(number),
        found[done[-1].step].value if done and state != "failed" else None,
        tuple(values),
        spread_of(by_fold(values, experiment), folds=experiment.folds > 0)
        if len(values) > 1
        else None,
        experiment.rules.rungs[done[-1].rung] if done else 0,
        state,
        reasons[0] if reasons else None,
        tuple(folder.run(number, member.name) for member in members),
    )
