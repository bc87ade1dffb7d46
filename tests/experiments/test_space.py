"""What a sweep searches."""

import pytest

from flambeau.errors import InputError
from flambeau.experiments.proposals import Known, propose
from flambeau.experiments.space import Dimension, Value, check_space, parse_space, size


def parsed(*, floats: bool = True, **texts: str) -> dict[str, Dimension]:
    def typed(_: str, value: Value) -> Value:
        return float(value) if floats and isinstance(value, int) else value

    return parse_space(texts, typed=typed, floats=lambda _: floats)


def test_ranges_and_values() -> None:
    assert parsed(lr="1e-4..1e-1:log")["lr"] == Dimension(low=1e-4, high=0.1, is_log=True)
    assert parsed(n="1..8", floats=False)["n"] == Dimension(low=1, high=8, is_whole=True)
    assert parsed(x="-1.5..2.")["x"] == Dimension(low=-1.5, high=2.0)
    assert parsed(model="a, b")["model"] == Dimension(("a", "b"))
    assert parsed(betas="0.9,0.99|0.9,0.999")["betas"] == Dimension(("0.9,0.99", "0.9,0.999"))
    assert parsed(flip="true,false", floats=False)["flip"] == Dimension((True, False))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1..0", "the first number must be below the second"),
        ("0..1:log", "both numbers must be above 0"),
        ("a,,b", "give a range such as"),
        ("a,a", "names a value twice"),
        ("1,1.0", "names a value twice"),
    ],
)
def test_texts_that_are_neither(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        parsed(lr=text)


def test_a_value_counts_as_right_if_some_combination_has_it() -> None:
    space = {"optimizer": Dimension(("sgd", "adamw")), "betas": Dimension(("0.9,0.99",))}

    def accept(some: dict[str, Value]) -> None:
        if some["optimizer"] == "sgd":
            raise InputError("betas has no effect")

    with pytest.raises(InputError, match="--set optimizer=sgd: betas has no effect"):
        check_space(space, accept)  # type: ignore[arg-type]
    check_space({"optimizer": Dimension(("adamw",)), "betas": space["betas"]}, accept)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_proposal_depends_on_what_is_known_alone(sampler: str) -> None:
    space = {"lr": Dimension(low=1e-4, high=1.0, is_log=True), "model": Dimension(("a", "b", "c"))}

    def history() -> list[Known]:
        known: list[Known] = []
        for number in range(16):
            settings = propose(space, known, sampler=sampler, seed=3, mode="max")
            known.append(Known(settings, {1: -abs(float(settings["lr"]) - 0.1)}, "whole"))
            assert all(dimension.holds(settings[name]) for name, dimension in space.items()), number
        return known

    first = history()
    assert history() == first
    assert len({str(one.settings) for one in first}) == 16
    again = propose(space, first[:9], sampler=sampler, seed=3, mode="max")
    assert again == first[9].settings


def test_tpe_looks_where_it_was_good() -> None:
    space = {"lr": Dimension(low=1e-4, high=1.0, is_log=True)}

    def near(sampler: str) -> int:
        known: list[Known] = []
        for _ in range(30):
            settings = propose(space, known, sampler=sampler, seed=0, mode="min")
            known.append(Known(settings, {1: abs(float(settings["lr"]) - 0.01)}, "whole"))
        return sum(0.003 < float(one.settings["lr"]) < 0.03 for one in known)

    assert near("tpe") > near("random")


def test_all_of_a_small_space_are_tried_once() -> None:
    space = {"a": Dimension((1, 2, 3)), "b": Dimension(("x", "y"))}
    known: list[Known] = []
    for _ in range(size(space) or 0):
        settings = propose(space, known, sampler="tpe", seed=0, mode="max")
        known.append(Known(settings, {1: 0.0}, "whole"))
    assert len({str(sorted(one.settings.items())) for one in known}) == 6
    assert size({**space, "c": Dimension(low=0, high=1)}) is None


def test_whole_numbers_are_finite_in_number_too() -> None:
    space = parsed(n="1..3", floats=False)
    known: list[Known] = []
    for _ in range(size(space) or 0):
        settings = propose(space, known, sampler="random", seed=1, mode="max")
        known.append(Known(settings, {1: 0.0}, "whole"))
    assert sorted(one.settings["n"] for one in known) == [1, 2, 3]
