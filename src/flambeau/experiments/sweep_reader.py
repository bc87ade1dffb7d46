"""A sweep from its folder alone, for commands that only look at it: its sweep.toml says what it is.

The file may come from elsewhere, so all of it is checked.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flambeau.errors import InputError
from flambeau.experiments.description import trial_members
from flambeau.experiments.plan import Rules, Step, next_step
from flambeau.experiments.result import SweepResult, result_of
from flambeau.experiments.space import Dimension, Value
from flambeau.experiments.sweep_folder import SweepFolder
from flambeau.experiments.sweeper import Experiment, outcomes
from flambeau.run.options.toml_file import load_toml

STORED = "sweep.toml"
_MOST = 100_000  # trials, rungs, members


def read_sweep(path: Path) -> tuple[Experiment, SweepResult]:
    """The sweep in a folder, and what it has found so far.

    Raises:
        InputError: the folder holds no sweep, or a file of it is damaged.
    """
    file = path / STORED
    try:
        stored = load_toml(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from error
    try:
        experiment = _experiment(stored)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file} is not what a sweep writes: restore it") from error
    folder = SweepFolder(path.resolve(), experiment.space, rungs=len(experiment.rules.rungs))
    folder.read()
    records = folder.records
    steps = [Step(step.trial, step.rung) for step in records.steps]
    found = outcomes(records, len(experiment.members))
    is_over = next_step(experiment.rules, steps, found) == "over" and len(found) == len(steps)
    return experiment, result_of(folder, experiment, is_over=is_over)


def best_runs(path: Path) -> tuple[Path, ...]:
    """The runs of a finished sweep's best trial.

    Raises:
        InputError: of a script, not over, or without a trial trained to its end.
    """
    experiment, result = read_sweep(path)
    if experiment.command is not None:
        raise InputError(
            f"{path} is a sweep of a script, which keeps its own images for a test: evaluate it by the script"
        )
    if not result.is_over:
        raise InputError(
            f"the sweep in {path} is not over, and a look at the test images ends its choices: give its "
            "command again first, or with fewer --trials"
        )
    if result.best is None:
        raise InputError(f"no trial of the sweep in {path} was trained to its end")
    return result.best.runs


def _experiment(stored: Mapping[str, Any]) -> Experiment:
    """Raises KeyError, TypeError or ValueError where a sweep would not have written it so."""
    space = {name: _dimension(one) for name, one in _of(dict, stored["space"]).items()}
    rungs = tuple(_count(one) for one in _of(list, stored["rungs"]))
    command = stored.get("command")
    mode = stored["mode"]
    if mode not in ("max", "min") or not rungs or sorted({*rungs}) != list(rungs):
        raise ValueError
    seed = _of(int, stored["seed"])
    folds = _count(stored["folds"], least=0)
    halving = _count(stored["halving"], least=0)
    return Experiment(
        space=space,
        rules=Rules(
            _count(stored["trials"]), rungs, halving or 2, _count(stored["at_once"]) - 1, mode
        ),
        settings=_of(dict, stored["settings"]),
        command=None if command is None else tuple(_of(str, word) for word in _of(list, command)),
        members=tuple(trial_members(seed, _count(stored["seeds"]), folds)),
        sampler=_of(str, stored["sampler"]),
        seed=seed,
        figure=_of(str, stored["figure"]),
        folds=folds,
    )


def _dimension(stored: Any) -> Dimension:
    if "values" in _of(dict, stored):
        values: list[Value] = _of(list, stored["values"])
        if not values or not all(isinstance(one, bool | int | float | str) for one in values):
            raise ValueError
        return Dimension(tuple(values))
    low, high = stored["low"], stored["high"]
    kinds = {type(low), type(high)}
    if kinds not in ({int}, {float}) or not low < high:
        raise ValueError
    return Dimension(low=low, high=high, is_log=_of(bool, stored["log"]), is_whole=kinds == {int})


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _count(value: Any, *, least: int = 1) -> int:
    if not least <= _of(int, value) <= _MOST:
        raise ValueError
    return int(value)
