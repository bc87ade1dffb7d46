"""From Python: `sweep` trains many choices of settings and finds the best."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from flambeau.errors import nearest
from flambeau.experiments.description import Described, Wanted, counted, describe
from flambeau.experiments.importance import FILE as IMPORTANCE
from flambeau.experiments.importance import importance_of
from flambeau.experiments.out_of_fold import write_figures, write_out_of_fold
from flambeau.experiments.result import SweepResult, result_of
from flambeau.experiments.space import Value
from flambeau.experiments.sweep_folder import SweepFolder
from flambeau.experiments.sweeper import Sweeper
from flambeau.experiments.worker_handle import visible_gpus
from flambeau.parallel.preemption import FLAG
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
from flambeau.run.options.durations import parse_seconds
from flambeau.run.options.toml_file import as_toml
from flambeau.terminal import say as terminal_say
from flambeau.trainer.settings.default_folder import check_outside
from flambeau.trainer.settings.settings import FIELDS


def sweep(
    data: str | Path | None = None,
    *,
    space: Mapping[str, str | Sequence[Value]],
    trials: int | None = None,
    out: str | Path | None = None,
    sampler: str = "tpe",
    halving: int = 0,
    at_once: int = 4,
    procs: int | None = None,
    seeds: int = 1,
    folds: int = 0,
    budget: str | None = None,
    command: Sequence[str] | None = None,
    figure: str | None = None,
    mode: Literal["max", "min"] | None = None,
    trust: bool = False,
    **settings: Any,
) -> SweepResult:
    """Train many choices of settings, as `flambeau sweep` does; the same call again goes on.

    Args:
        data: as for `train`.
        space: what is searched: by setting a range such as "1e-4..1e-1:log", values such as
            "resnet18,resnet34", or a list of values.
        trials: choices to try (None: 20, or all if there are fewer).
        out: folder of the sweep (None: runs/NAME-sweep-HASH).
        sampler: what proposes the choices: tpe (Optuna's, from the results so far), random, or grid (all).
        halving: at each rung one trial of so many goes on, such as 3; 0 trains all to the end.
        at_once: trials that can run at once, on all machines together: a choice is made without the results
            of so many before it, less one. Another number makes other choices.
        procs: trials that this process trains at once (None: one per GPU).
        seeds: runs of each choice with different seeds, whose means are compared.
        folds: runs of each choice, one per fold of a cross-validation, the same for all choices, whose means
            are compared; with `group` among the settings, groups stay together.
        budget: end after this time, such as "8h"; the same call goes on.
        command: a script with {NAME} for each setting of the space, in place of data and settings; it may
            have {out}, a folder for its `Run`, {seed}, {trial} and {epochs}.
        figure: what is compared: of a script, the name in a line of JSON that it prints.
        mode: "max" or "min" of `figure` is better (None: by its name).
        trust: as for `train`.
        settings: of `train`, for all trials.

    Returns:
        The trials and the best of them.

    Raises:
        InputError: an argument, or the folder, does not fit.
        Preempted: a signal came; all runs have saved themselves.
    """
    for name in settings:
        if name not in FIELDS:
            raise TypeError(f"sweep has no setting {name!r}{nearest(name, FIELDS)}")
    given = settings if data is None else {"data": str(data), **settings}
    epochs = None if command is None else given.pop("epochs", None)
    wanted = Wanted(
        given,
        space,
        None if command is None else tuple(command),
        trials=trials,
        sampler=sampler,
        halving=halving,
        at_once=at_once,
        seeds=seeds,
        folds=folds,
        figure=figure,
        mode=mode,
        epochs=epochs,
        trust=trust,
    )
    budget_s = None if budget is None else parse_seconds(budget, name="budget")
    folder = None if out is None else Path(out)
    return run_sweep(describe(wanted), folder, procs=procs, budget_s=budget_s, say=terminal_say)


def run_sweep(
    described: Described,
    out: Path | None,
    *,
    procs: int | None,
    budget_s: float | None,
    say: Callable[[str], None],
) -> SweepResult:
    """Begin or continue a sweep in its folder.

    Raises:
        InputError: the folder holds something else.
        Preempted: a signal came.
    """
    experiment = described.experiment
    folder = SweepFolder(
        (out or described.folder).resolve(), experiment.space, rungs=len(experiment.rules.rungs)
    )
    check_outside(folder.path, experiment.settings.get("data"))
    folder.begin(described.content)
    for line in _first_lines(described, folder):
        say(line)
    count = procs or max(1, len(visible_gpus(os.environ)))
    FLAG.install(folder)
    try:
        is_over = Sweeper(folder, experiment, count, say, budget_s).run()
    finally:
        FLAG.restore(folder)
    result = replace(
        result_of(folder, experiment, is_over=is_over),
        importance=importance_of(experiment, folder.records),
    )
    if result.importance is not None:
        result.importance.write(folder.path / IMPORTANCE)
    if result.best is not None and experiment.command is None:
        settings = {**experiment.settings, **result.best.settings}
        write_file(folder.path / "best.toml", as_toml(settings))
        if len(experiment.members) > 1:
            write_figures(folder.path / "figures.json", result.trials, experiment)
        if experiment.folds and is_over:
            path = folder.path / f"out_of_fold-{result.best.number:04d}.csv"
            write_out_of_fold(path, result.best, experiment, say=say)
    return result


def _first_lines(described: Described, folder: SweepFolder) -> list[str]:
    experiment = described.experiment
    rules = experiment.rules
    runs = len(experiment.members)
    what = counted(rules.trials, "trial")
    what += f" of {runs} runs" if runs > 1 else ""
    halving = (
        f", compared after {', '.join(map(str, rules.rungs))} epochs"
        if len(rules.rungs) > 1
        else ""
    )
    lines = [f"{what} by {experiment.figure} ({rules.mode}){halving}; in {folder.path}"]
    lines += [f"  {name}: {dimension}" for name, dimension in experiment.space.items()]
    lines.append(f"what each run prints is in {folder.path / 'logs'}")
    done = len(folder.records.results)
    if done:
        lines.append(f"going on after {counted(done, 'result')}")
    return lines
