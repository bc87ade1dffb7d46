"""How much each searched setting matters for the figure, and whether that is more than chance shows.

Source: Watanabe et al., "PED-ANOVA: efficiently quantifying hyperparameter importance in arbitrary
subspaces", IJCAI 2023, as Optuna has it: how the best trials differ from all in each setting. Its shares add
up to 1 also where no setting matters, so each is compared with those of the same trials with their figures
shuffled.
"""

import inspect
import json
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flambeau.experiments.proposals import distribution, engine
from flambeau.experiments.space import Space, Value
from flambeau.experiments.sweep_folder import Records
from flambeau.experiments.sweeper import Experiment, known_trials
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

FILE = "importance.json"
_LEAST = 10  # trials; with fewer the best three tenths are at most two
_BEST = 0.3  # of the trials; of a tenth, Optuna's default, 40 trials find less than half as often; measured
_SHUFFLES = 19  # one of 20 orders is the highest by chance in 5 %
_MOST_SETTINGS = 50


@dataclass(frozen=True)
class SettingImportance:
    """One setting.

    Attributes:
        share: of all importance.
        is_beyond_chance: it is more than with any shuffled figures.
    """

    name: str
    share: float
    is_beyond_chance: bool


@dataclass(frozen=True)
class Importance:
    """Of all searched settings.

    Attributes:
        settings: the most important one first; none if the trials do not tell.
        how: how it was made, or why there is none, in one sentence.
    """

    settings: tuple[SettingImportance, ...]
    how: str

    def lines(self) -> list[str]:
        """For the user."""
        if not self.settings:
            return [f"importance of settings: {self.how}"]
        texts = [
            f"{one.name} {one.share:.0%}{'' if one.is_beyond_chance else ' (chance may do it)'}"
            for one in self.settings
        ]
        return [f"importance of settings: {', '.join(texts)}", f"importance: {self.how}"]

    def write(self, path: Path) -> None:
        """Write the file of a sweep, whole or not at all."""
        write_file(path, json.dumps(asdict(self), indent=1).encode() + b"\n")


def importance_of(experiment: Experiment, records: Records) -> Importance:
    """Of the trials so far, at the highest rung that enough of them have reached."""
    space = {
        name: one
        for name, one in experiment.space.items()
        if one.every_value is None or len(one.every_value) > 1
    }
    if not space:
        return Importance((), "one choice alone was tried")
    if len(space) > _MOST_SETTINGS:
        return Importance((), f"{len(space)} settings are too many for it")
    known = known_trials(experiment, records, len(records.steps))
    for epochs in reversed(experiment.rules.rungs):
        reached = [trial for trial in known if epochs in trial.values]
        if len(reached) >= _LEAST:
            break
    else:
        return Importance(
            (), f"{len(reached)} trials have a figure, too few to say; {_LEAST} are needed"
        )
    values = [trial.values[epochs] for trial in reached]
    if min(values) == max(values):
        return Importance((), f"the figures of all {len(values)} trials are equal")
    settings = [trial.settings for trial in reached]
    found = _strengths(space, settings, values, mode=experiment.rules.mode)
    shuffled = _shuffled(space, settings, values, mode=experiment.rules.mode)
    total = sum(found.values()) or 1.0
    rows = [
        SettingImportance(name, found[name] / total, found[name] > shuffled[name])
        for name in sorted(found, key=lambda name: -found[name])
    ]
    rungs = experiment.rules.rungs
    after = f" after {epochs} of {rungs[-1]} epochs" if len(rungs) > 1 else ""
    how = (
        f"by PED-ANOVA (Optuna) from {len(values)} trials{after}: how the best {_BEST:.0%} of them differ "
        f"from all; 'chance may do it' where the same figures, shuffled {_SHUFFLES} times, once show as much"
    )
    return Importance(tuple(rows), how)


def _shuffled(
    space: Space, settings: Sequence[Mapping[str, Value]], values: Sequence[float], *, mode: str
) -> dict[str, float]:
    """The highest strength of each setting with shuffled figures."""
    order = random.Random(0)
    highest = dict.fromkeys(space, 0.0)
    for _ in range(_SHUFFLES):
        shuffled = order.sample(list(values), len(values))
        for name, strength in _strengths(space, settings, shuffled, mode=mode).items():
            highest[name] = max(highest[name], strength)
    return highest


def _strengths(
    space: Space, settings: Sequence[Mapping[str, Value]], values: Sequence[float], *, mode: str
) -> dict[str, float]:
    optuna = engine()
    distributions = {name: distribution(one) for name, one in space.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the evaluator may change
        kind = optuna.importance.PedAnovaImportanceEvaluator
        names = inspect.signature(kind).parameters
        share = "target_quantile" if "target_quantile" in names else "baseline_quantile"
        given: dict[str, Any] = {share: _BEST}  # its name before Optuna 5
        study = optuna.create_study(direction="maximize" if mode == "max" else "minimize")
        study.add_trials(
            [
                optuna.trial.create_trial(
                    params={name: one[name] for name in space},
                    distributions=distributions,
                    value=value,
                )
                for one, value in zip(settings, values, strict=True)
            ]
        )
        found = optuna.importance.get_param_importances(
            study, evaluator=kind(**given), normalize=False
        )
    return {name: float(found.get(name, 0.0)) for name in space}
