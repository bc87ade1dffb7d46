"""What a sweep is, from what its user has given: the space, the rules and the runs of each trial."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flambeau.errors import InputError, nearest
from flambeau.experiments.job import names_in
from flambeau.experiments.plan import Outcome, Rules, Step, next_step, rungs
from flambeau.experiments.proposals import check_sampler
from flambeau.experiments.space import (
    Dimension,
    Space,
    Value,
    check_space,
    combinations,
    parse_space,
    size,
)
from flambeau.experiments.sweeper import Experiment, Member
from flambeau.run.options.better_figure import DEFAULT_BEST, better_by_name
from flambeau.run.options.option import allowed_types, typed
from flambeau.trainer.settings.default_folder import default_folder, given_settings
from flambeau.trainer.settings.settings import FIELDS, Settings
from flambeau.trainer.settings.stored_settings import canonical, with_preset

_NOT_COMPARABLE = {
    "fold",
    "best",
    "data",
    "group",
    "ignore_index",
    "label_separator",
    "split",
    "target",
    "task",
    "test",
}
_LENGTHS = ("epochs", "duration", "extend")
_MAX_TRIALS = 100_000


@dataclass(frozen=True)
class Wanted:
    """What the user of a sweep has given.

    Attributes:
        settings: of `flambeau train`, for all trials.
        command: of a script, in place of them.
        space: texts such as '1e-4..1e-1:log' or 'a,b', or lists of values, by setting.
        trials: choices to try.
        halving: one of so many goes on at each rung; 0 trains all to the end.
        at_once: steps that may be decided before their results are known, and so run at once.
        seeds: runs of each choice.
        folds: of a cross-validation of each choice; 0 for the usual hold-out.
        figure, mode: of a script: what is compared, and whether 'max' or 'min' is better.
        epochs: whole length of a script with halving.
    """

    settings: Mapping[str, Any]
    space: Mapping[str, str | Sequence[Value]]
    command: tuple[str, ...] | None = None
    trials: int | None = None
    sampler: str = "tpe"
    halving: int = 0
    at_once: int = 4
    seeds: int = 1
    folds: int = 0
    figure: str | None = None
    mode: Literal["max", "min"] | None = None
    epochs: int | None = None
    trust: bool = False


@dataclass(frozen=True)
class Described:
    """A sweep, ready to run.

    Attributes:
        content: of sweep.toml.
        folder: the default one.
    """

    experiment: Experiment
    content: Mapping[str, Any]
    folder: Path


def describe(wanted: Wanted) -> Described:
    """Check what is wanted, and look at the data for the rest.

    Raises:
        InputError: a refused setting, range, or combination; unreadable data.
    """
    _check_counts(wanted)
    if wanted.command is not None:
        return _of_script(wanted, wanted.command)
    given = with_preset(wanted.settings)
    if wanted.folds and "fold" in given:
        raise InputError("fold is one of them, and folds are all: leave one of the two out")
    space = _space_of_train(wanted, given)
    check_space(space, lambda some: canonical(Settings(**{**given, **some})))
    settings = canonical(Settings(**{**given, **_accepted(space, given)}))
    kept = given_settings(settings, given)
    first = replace(settings, fold=f"1/{wanted.folds}") if wanted.folds else settings
    models = space["model"].examples if "model" in space else ()
    figure, epochs = _resolved(first, models, whole_epochs=bool(wanted.halving))
    base = _accepted_base(kept, space)
    experiment = _experiment(
        wanted, space, base, figure=figure, mode=better_by_name(figure) or "max", epochs=epochs
    )
    folder = default_folder(settings, {k: v for k, v in base.items() if k in FIELDS})
    return _described(wanted, experiment, folder)


def _of_script(wanted: Wanted, command: tuple[str, ...]) -> Described:
    if wanted.settings.keys() - {"seed"}:
        name = next(iter(wanted.settings.keys() - {"seed"}))
        raise InputError(
            f"{name} is a setting of flambeau train; a script gets its own in the command behind --"
        )
    named = names_in(command)
    space = _parsed(wanted.space, typed=lambda _, value: value, floats=lambda _: False)
    for name in space:
        if name not in named:
            raise InputError(
                f"{name} is searched, and the command has no {{{name}}} in it: add it where the script reads "
                f"it, such as --{name} {{{name}}}"
            )
    for name, count in (("seed", wanted.seeds), ("fold", wanted.folds)):
        if count > 1 and name not in named:
            raise InputError(
                f"{count} {name}s, and the command has no {{{name}}}: add it where the script reads it"
            )
    if wanted.halving and wanted.epochs is None:
        raise InputError("halving a script needs --epochs N, its whole length in epochs")
    figure = wanted.figure or DEFAULT_BEST
    mode = wanted.mode or better_by_name(figure)
    if mode is None:
        raise InputError(
            f"{figure!r} does not tell whether more or less of it is better: give --mode max or --mode min"
        )
    experiment = _experiment(
        wanted, space, dict(wanted.settings), figure=figure, mode=mode, epochs=wanted.epochs or 1
    )
    script = next(
        (Path(word).stem for word in command if word.endswith(".py")), Path(command[0]).stem
    )
    return _described(wanted, experiment, Path("runs") / script)


def _described(wanted: Wanted, experiment: Experiment, base: Path) -> Described:
    rules = experiment.rules
    content = {
        "space": {name: _stored(dimension) for name, dimension in experiment.space.items()},
        "settings": dict(experiment.settings),
        "command": None if experiment.command is None else list(experiment.command),
        "figure": experiment.figure,
        "mode": rules.mode,
        "trials": rules.trials,
        "sampler": experiment.sampler,
        "halving": wanted.halving,
        "rungs": list(rules.rungs),
        "at_once": rules.ahead + 1,
        "seeds": wanted.seeds,
        "folds": wanted.folds,
        "seed": experiment.seed,
    }
    named = {k: v for k, v in content.items() if k != "trials"}
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:8]
    return Described(experiment, content, base.with_name(f"{base.name}-sweep-{digest}"))


def _experiment(
    wanted: Wanted,
    space: Space,
    settings: Mapping[str, Any],
    *,
    figure: str,
    mode: Literal["max", "min"],
    epochs: int,
) -> Experiment:
    check_sampler(wanted.sampler, space)
    trials = wanted.trials
    count = size(space)
    if trials is None:
        trials = count if count is not None and (wanted.sampler == "grid" or count < 20) else 20
    if count is not None:
        trials = min(trials, count)  # there are no others
    seed = int(settings.get("seed", 0))
    members = trial_members(seed, wanted.seeds, wanted.folds)
    stages = rungs(epochs, wanted.halving) if wanted.halving else (epochs,)
    return Experiment(
        space=space,
        rules=Rules(trials, stages, wanted.halving or 2, wanted.at_once - 1, mode),
        settings=settings,
        command=wanted.command,
        members=tuple(members),
        sampler=wanted.sampler,
        seed=seed,
        figure=figure,
        trust=wanted.trust,
        folds=wanted.folds,
    )


def trial_members(seed: int, seeds: int, folds: int) -> list[Member]:
    """The runs of a choice, fold by fold; one without a name if nothing varies."""
    of_folds = [(f"fold{n}", {"fold": f"{n}/{folds}"}) for n in range(1, folds + 1)] or [("", {})]
    of_seeds = (
        [(f"seed{seed + n}", {"seed": seed + n}) for n in range(seeds)] if seeds > 1 else [("", {})]
    )
    return [
        Member("-".join(filter(None, (fold, one))), {**fold_settings, **seed_settings})
        for fold, fold_settings in of_folds
        for one, seed_settings in of_seeds
    ]


def _check_counts(wanted: Wanted) -> None:
    counts = {"trials": wanted.trials, "at_once": wanted.at_once, "seeds": wanted.seeds}
    for name, count in counts.items():
        if count is not None and not 1 <= count <= _MAX_TRIALS:
            raise InputError(f"{name} must be from 1 to {_MAX_TRIALS}, got {count}")
    if wanted.halving and not 2 <= wanted.halving <= 100:
        raise InputError(f"halving must be from 2 to 100, got {wanted.halving}")
    if wanted.folds and not 2 <= wanted.folds <= 100:
        raise InputError(f"folds must be from 2 to 100, got {wanted.folds}")
    if not wanted.space and wanted.seeds == 1 and not wanted.folds:
        raise InputError(
            "nothing to compare: give a setting with several values, such as --set lr=1e-4..1e-1:log, or "
            "several --seeds, or --folds"
        )


def _space_of_train(wanted: Wanted, given: Mapping[str, Any]) -> dict[str, Dimension]:
    space = {name.replace("-", "_"): one for name, one in wanted.space.items()}
    for name in space:
        if name not in FIELDS:
            raise InputError(f"unknown setting {name!r}{nearest(name, FIELDS)}")
        if name in given:
            raise InputError(f"{name} is searched, and given as well: leave one of them out")
        if name == "seed":
            raise InputError("seed cannot be searched; --seeds 3 trains each choice with three")
        if name in _NOT_COMPARABLE:
            raise InputError(
                f"{name} cannot be searched: figures of trials would not be comparable"
            )
        if FIELDS[name].metadata["may_change"] or FIELDS[name].metadata["group"] == "run folder":
            raise InputError(f"{name} cannot be searched: it changes no figure")
        if name in _LENGTHS and wanted.halving:
            raise InputError(f"{name} cannot be searched with halving, which stops trials early")
    return _parsed(
        space,
        typed=lambda name, value: typed(FIELDS[name], value),
        floats=lambda name: float in allowed_types(FIELDS[name]),
    )


def _parsed(space: Mapping[str, str | Sequence[Value]], **how: Any) -> dict[str, Dimension]:
    texts = {name: one for name, one in space.items() if isinstance(one, str)}
    parsed = parse_space(texts, **how)
    for name, one in space.items():
        if not isinstance(one, str):
            values = tuple(how["typed"](name, value) for value in one)
            if not values or len(set(values)) < len(values):
                raise InputError(f"{name}: give different values, at least one; got {one!r:.200}")
            parsed[name] = Dimension(values)
    return {name: parsed[name] for name in space}


def _accepted(space: Space, given: Mapping[str, Any]) -> dict[str, Value]:
    """The first combination of the space that is not refused."""
    for some in combinations(space, ends=True):
        try:
            Settings(**{**given, **some})
        except InputError:
            continue
        return some
    return {}


def _accepted_base(kept: Mapping[str, Any], space: Space) -> dict[str, Any]:
    """The given settings in one spelling, without those that are searched."""
    searched = {*space, *(("epochs", "duration") if {"epochs", "duration"} & space.keys() else ())}
    return {name: value for name, value in kept.items() if name not in searched}


def _resolved(
    settings: Settings, models: Sequence[Value], *, whole_epochs: bool
) -> tuple[str, int]:
    """The figure that chooses the best weights, and the number of epochs, as the data and settings have them.

    Args:
        models: names that are searched.

    Raises:
        InputError: the data cannot be read; nobody has a model of such a name; the length is not in whole
            epochs where these are needed.
    """
    from flambeau.optional_packages import large_import
    from flambeau.run.options.durations import parse_duration

    with large_import():
        from flambeau.trainer.parts.auto_settings import resolve
        from flambeau.trainer.parts.data import open_data, with_test
        from flambeau.trainer.parts.model import check_model_name

    train, val = open_data(settings)
    resolved, facts = resolve(settings, train, val)
    with_test(facts, resolved, train, val)  # refuses a test part that is none
    for name in models:
        try:
            check_model_name(str(name), per_pixel=facts.task.per_pixel)
        except InputError as error:
            raise InputError(f"--set model={name}: {error}") from error
    duration = parse_duration(resolved.duration, name="duration")
    if duration.unit != "ep" or duration.amount != int(duration.amount):
        if whole_epochs:
            raise InputError(
                f"halving needs a length in whole epochs, and duration = {resolved.duration!r}: give --epochs"
            )
        return resolved.best, 1
    return resolved.best, int(duration.amount)


def _stored(dimension: Dimension) -> dict[str, Any]:
    if dimension.values:
        return {"values": list(dimension.values)}
    return {"low": dimension.low, "high": dimension.high, "log": dimension.is_log}


def counted(number: int, noun: str) -> str:
    """'1 trial', '2 trials'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def planned_epochs(rules: Rules) -> tuple[int, int]:
    """A sweep's number of steps, if no trial fails, and their epochs of one run."""
    steps: list[Step] = []
    outcomes: dict[int, Outcome] = {}
    epochs = 0
    while not isinstance(decided := next_step(rules, steps, outcomes), str):
        step = decided[0]
        before = rules.rungs[step.rung - 1] if step.rung else 0
        epochs += rules.rungs[step.rung] - before
        outcomes[len(steps)] = Outcome(0.0)
        steps.append(step)
    return len(steps), epochs
