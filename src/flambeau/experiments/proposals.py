"""The settings of a new trial, by Optuna: a pure function of seed, number and the results it may see."""

import hashlib
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from flambeau.errors import InputError
from flambeau.experiments.space import Dimension, Space, Value, combinations, size
from flambeau.optional_packages import extra

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

SAMPLERS = ("tpe", "random", "grid")
_REDRAWS = 20  # of settings that were tried already


@dataclass(frozen=True)
class Known:
    """A trial as the sampler may see it.

    Attributes:
        values: its known figure after each rung, by epochs.
        state: running (a result is missing), whole, halved, or failed.
    """

    settings: Mapping[str, Value]
    values: Mapping[int, float]
    state: Literal["running", "whole", "halved", "failed"]


def propose(
    space: Space,
    known: Sequence[Known],
    *,
    sampler: str,
    seed: int,
    mode: Literal["max", "min"],
) -> dict[str, Value]:
    """The settings of the trial after those in `known`; new ones, if any."""
    number = len(known)
    if sampler == "grid" or not space:
        return next(itertools.islice(combinations(space), number, None))
    tried = [dict(trial.settings) for trial in known]
    for attempt in range(_REDRAWS):
        drawn = _drawn(space, known, sampler, _seed(seed, number, attempt), mode)
        if drawn not in tried:
            return drawn
    if size(space) is not None:
        return next((one for one in combinations(space) if one not in tried), drawn)
    return drawn


def _drawn(
    space: Space, known: Sequence[Known], sampler: str, seed: int, mode: Literal["max", "min"]
) -> dict[str, Value]:
    optuna = engine()
    distributions = {name: distribution(dimension) for name, dimension in space.items()}
    samplers = optuna.samplers
    chosen: BaseSampler = (
        samplers.TPESampler(seed=seed) if sampler == "tpe" else samplers.RandomSampler(seed=seed)
    )
    study = optuna.create_study(
        sampler=chosen, direction="maximize" if mode == "max" else "minimize"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # values of `known` that a later version finds unusual
        study.add_trials([frozen(trial, distributions) for trial in known])
        return dict(study.ask(distributions).params)


def frozen(known: Known, distributions: Mapping[str, "BaseDistribution"]) -> "FrozenTrial":
    """The trial as Optuna has it."""
    optuna = engine()
    states = optuna.trial.TrialState
    last = known.values[max(known.values)] if known.values else None
    state = {
        "running": states.RUNNING,
        "whole": states.COMPLETE,
        "halved": states.PRUNED,
        "failed": states.FAIL,
    }[known.state]
    made: FrozenTrial = optuna.trial.create_trial(
        state=state,
        value=last if known.state == "whole" else None,
        params=dict(known.settings),
        distributions=dict(distributions),
        intermediate_values=dict(known.values),
    )
    return made


def distribution(dimension: Dimension) -> "BaseDistribution":
    kinds = engine().distributions
    made: BaseDistribution
    if dimension.values:
        made = kinds.CategoricalDistribution(dimension.values)
    elif dimension.is_whole:
        made = kinds.IntDistribution(int(dimension.low), int(dimension.high), log=dimension.is_log)
    else:
        made = kinds.FloatDistribution(dimension.low, dimension.high, log=dimension.is_log)
    return made


def engine() -> Any:
    """Optuna, which reports less than it would alone."""
    optuna = extra("optuna", what="flambeau sweep")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def check_sampler(sampler: str, space: Space) -> None:
    """Refuse an unknown sampler, and a grid over ranges.

    Raises:
        InputError: it is either.
    """
    if sampler not in SAMPLERS:
        raise InputError(f"--sampler must be one of {', '.join(SAMPLERS)}; got {sampler!r:.50}")
    ranges = [name for name, dimension in space.items() if dimension.every_value is None]
    if sampler == "grid" and ranges:
        raise InputError(
            f"--sampler grid needs values, and {ranges[0]} is a range: list them, such as "
            f"--set {ranges[0]}=1,2,3"
        )


def _seed(seed: int, number: int, attempt: int) -> int:
    digest = hashlib.sha256(f"{seed}:{number}:{attempt}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
