"""How much each searched setting matters."""

import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest

from flambeau.experiments.importance import Importance, importance_of
from flambeau.experiments.plan import Rules
from flambeau.experiments.space import Dimension
from flambeau.experiments.sweep_folder import DecidedStep, MemberResult, Records
from flambeau.experiments.sweeper import Experiment, Member

pytest.importorskip("optuna")
SPACE = {
    "lr": Dimension(low=1e-4, high=1e-1, is_log=True),
    "mixup": Dimension(low=0.0, high=1.0),
    "model": Dimension(("a", "b")),
}


def found(
    value: Callable[[Mapping[str, Any]], float],
    trials: int,
    *,
    rungs: tuple[int, ...] = (1,),
    mode: Literal["max", "min"] = "max",
    reached: int | None = None,
) -> Importance:
    """Of trials by chance; the first `reached` of them were trained to the last rung."""
    draw = random.Random(0)
    records = Records()
    choices = [
        {"lr": 10 ** draw.uniform(-4, -1), "mixup": draw.random(), "model": draw.choice("ab")}
        for _ in range(trials)
    ]
    steps = [(trial, 0) for trial in range(trials)]
    steps += [(trial, rung) for rung in range(1, len(rungs)) for trial in range(reached or 0)]
    for number, (trial, rung) in enumerate(steps):
        settings = None if rung else choices[trial]
        records.steps.append(DecidedStep(number, trial, rung, 0, settings))
        records.results[number, 0] = MemberResult(
            number, 0, value(choices[trial]), None, rung == len(rungs) - 1, 1.0
        )
    experiment = Experiment(
        SPACE, Rules(trials, rungs, 3, 0, mode), {}, None, (Member("", {}),), "tpe", 0, "val_loss"
    )
    return importance_of(experiment, records)


@pytest.mark.parametrize(("mode", "sign"), [("max", 1), ("min", -1)])
def test_the_setting_that_matters_is_found(mode: Literal["max", "min"], sign: int) -> None:
    def figure(one: Mapping[str, Any]) -> float:
        return sign * (-abs(one["lr"] - 0.01) + 0.001 * one["mixup"])

    answer = found(figure, 40, mode=mode)
    assert answer.settings[0].name == "lr"
    assert answer.settings[0].share > 0.5
    assert [one.name for one in answer.settings if one.is_beyond_chance] == ["lr"]
    assert sum(one.share for one in answer.settings) == pytest.approx(1)
    assert "from 40 trials:" in answer.how


def test_nothing_is_found_in_noise() -> None:
    noise = random.Random(1)
    answer = found(lambda _: noise.random(), 40)
    assert len(answer.settings) == 3
    assert not any(one.is_beyond_chance for one in answer.settings)
    assert "chance may do it" in answer.lines()[0]


def test_what_tells_nothing() -> None:
    assert found(lambda one: one["lr"], 9).settings == ()
    assert "9 trials have a figure, too few" in found(lambda one: one["lr"], 9).how
    assert "are equal" in found(lambda _: 0.5, 12).how


@pytest.mark.parametrize(("reached", "said"), [(12, "from 12 trials after 9 of 9"), (3, "40")])
def test_the_highest_rung_of_enough_trials(reached: int, said: str) -> None:
    answer = found(lambda one: one["lr"], 40, rungs=(3, 9), reached=reached)
    assert said in answer.how
    assert ("after 3 of 9" in answer.how) == (reached == 3)
