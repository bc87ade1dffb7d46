"""Which trial comes next."""

import random
from collections.abc import Callable

import pytest

from flambeau.experiments.plan import Outcome, Rules, Step, next_step, rungs


def played(
    rules: Rules, value: Callable[[Step], float | None], rng: random.Random
) -> list[tuple[Step, int]]:
    """All steps of a sweep whose open steps end in a random order."""
    steps: list[tuple[Step, int]] = []
    outcomes: dict[int, Outcome] = {}
    while True:
        decided = next_step(rules, [step for step, _ in steps], outcomes)
        if not isinstance(decided, str):
            steps.append(decided)
            continue
        waiting = [number for number in range(len(steps)) if number not in outcomes]
        if not waiting:
            assert decided == "over"
            return steps
        number = rng.choice(waiting)
        outcomes[number] = Outcome(value(steps[number][0]))


def value_of(step: Step) -> float | None:
    """A figure per trial and rung; each seventh trial fails."""
    if step.trial % 7 == 6:
        return None
    return random.Random(step.trial).random() + 0.1 * step.rung


@pytest.mark.parametrize("ahead", [0, 3, 8])
def test_the_order_in_which_runs_end_changes_nothing(ahead: int) -> None:
    rules = Rules(20, (1, 3, 9), 3, ahead, "max")
    plans = [played(rules, value_of, random.Random(seed)) for seed in range(30)]
    assert all(plan == plans[0] for plan in plans)


def test_no_step_is_repeated_and_no_rung_is_left_out() -> None:
    steps = [
        step for step, _ in played(Rules(30, (1, 3, 9), 3, 4, "max"), value_of, random.Random(0))
    ]
    assert len(set(steps)) == len(steps)
    assert [step.trial for step in steps if step.rung == 0] == list(range(30))
    for step in steps:
        assert step.rung == 0 or steps.index(Step(step.trial, step.rung - 1)) < steps.index(step)


def test_the_best_third_goes_on() -> None:
    """With every result known the rungs hold a third of those below, and these are the best."""
    steps = [
        step for step, _ in played(Rules(27, (1, 3, 9), 3, 0, "max"), value_of, random.Random(0))
    ]
    on = {rung: {step.trial for step in steps if step.rung == rung} for rung in range(3)}
    ranked = sorted(on[0], key=lambda trial: -(value_of(Step(trial, 0)) or -1.0))
    assert set(ranked[:9]) <= on[1]
    assert 3 <= len(on[2]) <= len(on[1]) // 3 + 1
    failed = {trial for trial in on[0] if value_of(Step(trial, 0)) is None}
    assert not failed & on[1]


def test_less_is_better_with_min() -> None:
    steps = [
        step
        for step, _ in played(Rules(3, (1, 3), 3, 0, "min"), lambda s: s.trial, random.Random(0))
    ]
    assert steps[-1] == Step(0, 1)


def test_of_few_trials_one_is_trained_to_the_end() -> None:
    steps = [
        step
        for step, _ in played(Rules(2, (1, 3, 9), 3, 3, "max"), lambda s: s.trial, random.Random(0))
    ]
    assert steps == [Step(0, 0), Step(1, 0), Step(1, 1), Step(1, 2)]


def test_nothing_goes_on_where_all_have_failed() -> None:
    steps = [
        step for step, _ in played(Rules(4, (1, 3), 2, 1, "max"), lambda _: None, random.Random(0))
    ]
    assert steps == [Step(trial, 0) for trial in range(4)]


@pytest.mark.parametrize(
    ("epochs", "factor", "expected"), [(27, 3, (1, 3, 9, 27)), (10, 2, (1, 2, 5, 10)), (2, 3, (2,))]
)
def test_rungs(epochs: int, factor: int, expected: tuple[int, ...]) -> None:
    assert rungs(epochs, factor) == expected
