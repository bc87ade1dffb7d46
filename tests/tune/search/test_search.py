"""The search on simulated timings: machines whose costs are known, so that the right answer is."""

import itertools
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from flambeau.tune.search.levers import (
    Choice,
    Lever,
    LoaderFacts,
    Setting,
    TrainFacts,
    levers_of_script,
    levers_of_train,
)
from flambeau.tune.search.search import Measured, Search, SearchResult


def lever(name: str, *values: str, **kind: bool) -> Lever:
    return Lever(name, tuple(Setting(value) for value in values), **kind)


LEVERS = [
    lever("workers", "0", "1", "2", "4"),
    lever("threads", "1"),
    lever("precision", "bf16", is_rounding=True),
    lever("compile", "default", costs_start=True),
]


class Machine:
    """Costs as factors per value of a lever, with noise that drifts as a shared machine does."""

    def __init__(self, factors: Mapping[tuple[str, str], float], *, noise: float = 0.0) -> None:
        self.factors, self.noise = factors, noise
        self.draw, self.trials = random.Random(7), 0
        self.losses: dict[str, float] = {}
        self.starts: dict[str, float] = {}
        self.failing: tuple[str, str] | None = None

    def true_cost(self, choice: Choice) -> float:
        cost = 1.0
        for pair in choice.items():
            cost *= self.factors.get(pair, 1.0)
        return cost

    def measure(self, choice: Choice) -> Measured:
        self.trials += 1
        if self.failing is not None and self.failing in choice.items():
            return Measured(None, failure="killed")
        drift = 1 + 0.1 * (self.trials % 20) / 20
        cost = self.true_cost(choice) * drift * self.draw.lognormvariate(0, self.noise or 1e-4)
        loss = next((self.losses[v] for v in choice.values() if v in self.losses), 2.0)
        start = max([5.0, *(self.starts.get(v, 0.0) for v in choice.values())])
        return Measured(cost, start, (loss, loss, loss))


def search(
    machine: Machine, *, left_s: float = 3600.0, is_over: Callable[[int], bool] = lambda more: False
) -> SearchResult:
    one = Search(machine.measure, rounds=3, is_over=is_over, left_s=left_s, loss_bound=0.05)
    return one.run(LEVERS, first=machine.measure({}))


def best_of_grid(machine: Machine) -> float:
    choices = itertools.product(*([None, *(s.value for s in one.settings)] for one in LEVERS))
    names = [one.name for one in LEVERS]
    return min(
        machine.true_cost({n: v for n, v in zip(names, values, strict=True) if v is not None})
        for values in choices
    )


@pytest.mark.parametrize("seed", range(30))
def test_as_good_as_the_whole_grid_where_levers_multiply(seed: int) -> None:
    draw = random.Random(seed)
    factors = {
        (one.name, setting.value): draw.choice([0.5, 0.7, 0.8, 1.0, 1.1, 1.5])
        for one in LEVERS
        for setting in one.settings
    }
    machine = Machine(factors, noise=0.01)
    found = search(machine)
    assert machine.true_cost(found.choice) <= 1.0
    # A list of values ends where it gets much worse, so a second minimum behind that is not looked for.
    reached = [one for one in found.steps if one.gain is not None]
    assert machine.true_cost(found.choice) <= 1.03 * min(
        best_of_grid(machine) if len(reached) == 7 else machine.true_cost(found.choice), 1.0
    )
    # Each value in three pairs, the choice in three, what is chosen once more alone, and some in six more.
    assert machine.trials < (7 + 1 + len(found.choice)) * 2 * 3 + 10 + 2 * (2 * 6)


def test_nothing_is_chosen_on_a_machine_where_nothing_helps() -> None:
    slower = 0
    for seed in range(20):
        machine = Machine({}, noise=0.03)
        machine.draw = random.Random(seed)
        slower += bool(search(machine).choice)
    assert slower <= 8  # each of seven values has one chance in twenty, and three pairs to take it


def test_what_may_be_better_is_looked_at_again_while_there_is_time() -> None:
    """Four percent in noise of two: three pairs are seldom sure, and six more are."""

    def chosen(is_over: Callable[[int], bool]) -> int:
        count = 0
        for seed in range(40):
            machine = Machine({("compile", "default"): 0.96}, noise=0.02)
            machine.draw = random.Random(seed)
            found = search(machine, is_over=is_over)
            count += found.choice.get("compile") == "default"
        return count

    assert chosen(lambda more: False) > 32
    # 12 trials for a second look, and 6 for the comparison in the end.
    assert chosen(lambda more: more >= 18) < 28
    assert chosen(lambda more: more > 18) > 32


def test_a_precision_whose_loss_leaves_the_others_is_refused() -> None:
    machine = Machine({("precision", "bf16"): 0.5})
    machine.losses["bf16"] = 2.2
    found = search(machine)
    assert "precision" not in found.choice
    (step,) = (one for one in found.steps if one.lever == "precision")
    refused = "refused: the loss of the first steps differs by 10% from that of the run as it is"
    assert step.note == refused
    machine.losses["bf16"] = float("nan")
    assert "precision" not in search(machine).choice


@pytest.mark.parametrize("native", [True, False])
def test_losses_are_held_against_those_of_full_precision(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a run as it is computes in bfloat16, its own losses are no measure."""
    monkeypatch.setattr("flambeau.tune.search.levers.native_bf16", lambda device: native)
    levers = levers_of_train([], objective="throughput", device=CPU, run=TrainFacts(64))
    calls = list[Choice]()

    def found(
        losses: Mapping[str, float], factors: Mapping[tuple[str, str], float]
    ) -> SearchResult:
        machine = Machine(factors)
        machine.losses |= losses
        calls.clear()

        def measure(choice: Choice) -> Measured:
            calls.append(dict(choice))
            return machine.measure(choice)

        one = Search(measure, rounds=3, is_over=lambda more: False, left_s=1e6, loss_bound=0.05)
        return one.run(levers, first=machine.measure({}))

    full = {"precision": "fp32"}
    smaller = {("micro-batch", "32 x 2"): 0.5}
    chosen = found({"fp32": 1.8, "32 x 2": 1.8}, smaller).choice
    assert ("micro-batch" in chosen) is native  # 1.8, not 2.0 as it is, is what it should be
    assert calls.count(full) <= 2  # its own comparison, and one as the measure
    if native:
        assert found({"fp32": 1.8}, {("precision", "fp32"): 0.5}).choice == full
        assert "micro-batch" not in found({"fp32": 1.8, "32 x 2": 2.0}, smaller).choice


def test_losses_are_compared_as_far_as_both_trials_came() -> None:
    machine = Machine({("precision", "bf16"): 0.5})
    plain = machine.measure
    curves = {True: (2.3,), False: (2.0, 1.0, 0.5)}
    found = []
    for of_bf16 in ((2.3,), (2.05,)):
        curves[True] = of_bf16
        one = Search(
            lambda choice: replace(plain(choice), losses=curves["precision" in choice]),
            rounds=3, is_over=lambda more: False, left_s=1e6, loss_bound=0.05,
        )  # fmt: skip
        found.append("precision" in one.run(LEVERS, first=one._measure({})).choice)
    assert found == [False, True]


def test_compiling_must_pay_for_its_start() -> None:
    machine = Machine({("compile", "default"): 0.8})
    machine.starts["default"] = 65.0
    assert search(machine, left_s=3600).choice == {"compile": "default"}
    found = search(machine, left_s=200)
    assert found.choice == {}
    notes = [one.note for one in found.steps if one.lever == "compile"]
    assert re.fullmatch(r"takes 60 s longer to start, and saves 4\d s of the planned run", notes[0])


def test_a_trial_that_dies_is_an_answer() -> None:
    machine = Machine({("threads", "1"): 0.7})
    machine.failing = ("workers", "1")
    found = search(machine)
    assert found.choice == {"threads": "1"}
    assert [one.note for one in found.steps if one.value == "1" and one.lever == "workers"] == [
        "killed"
    ]


def test_no_comparison_begins_when_time_is_over() -> None:
    machine = Machine({("workers", "0"): 0.5})
    found = search(machine, is_over=lambda more: machine.trials > 4)
    assert [one.note for one in found.steps[1:]] == ["no time was left"] * 6


def test_a_choice_that_turns_out_slower_is_given_back() -> None:
    machine = Machine({("threads", "1"): 0.8, ("precision", "bf16"): 0.8})
    plain = machine.measure

    def measure(choice: Choice) -> Measured:
        found = plain(choice)
        return Measured(2.0, 5.0, (2.0,)) if len(choice) == 2 and machine.is_last else found

    machine.is_last = False  # type: ignore[attr-defined]
    one = Search(measure, rounds=3, is_over=lambda more: False, left_s=1e6, loss_bound=0.05)
    compare, calls = one._compare, []

    def noted(base: Choice, other: Choice, **how: int | None) -> object:
        machine.is_last = base == {} and len(other) == 2  # type: ignore[attr-defined]
        calls.append((dict(base), dict(other)))
        return compare(base, other, **how)

    one._compare = noted  # type: ignore[method-assign,assignment]
    found = one.run(LEVERS, first=measure({}))
    assert calls[-1] == ({}, {"threads": "1", "precision": "bf16"})
    assert found.together is not None and found.together.verdict == "slower"
    assert found.choice == {}


def test_what_each_lever_gives_alone_and_on_top_of_the_others() -> None:
    """One worker makes threads useless: together they give no more than each of them."""
    machine = Machine({("workers", "1"): 0.8, ("threads", "1"): 0.8, ("precision", "bf16"): 0.5})
    plain = machine.true_cost
    machine.true_cost = lambda choice: (
        plain(choice)
        * (  # type: ignore[method-assign]
            1.125 if {"workers", "threads"} <= set(choice) else 1.0
        )
    )
    found = search(machine)
    assert found.choice == {"workers": "1", "threads": "1", "precision": "bf16"}
    assert [one.value for one in found.settings] == ["1", "1", "bf16"]
    chosen = {one.lever: one for one in found.steps if one.is_chosen}
    for name, alone, on_top in (
        ("workers", 0.8, 0.8),
        ("threads", 0.8, 0.9),
        ("precision", 0.5, 0.5),
    ):
        step = chosen[name]
        assert step.alone is not None and step.gain is not None
        assert step.alone.times == pytest.approx(1 / alone, rel=0.06)
        assert step.gain.times == pytest.approx(1 / on_top, rel=0.06)
    assert found.together is not None
    assert found.together.times == pytest.approx(1 / (0.8 * 0.8 * 1.125 * 0.5), rel=0.06)
    unchosen = [one for one in found.steps if one.lever == "compile"]
    assert [one.alone for one in unchosen] == [None]


CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def known(levers: list[Lever]) -> dict[str, list[str]]:
    return {one.name: [setting.value for setting in one.settings] for one in levers}


def test_forward_passes_are_made_smaller_for_the_same_step() -> None:
    for objective in ("throughput", "memory"):
        levers = levers_of_train([], objective=objective, device=CPU, run=TrainFacts(48, 2))
        (micro,) = (one for one in levers if one.name == "micro-batch")
        assert [one.value for one in micro.settings] == ["24 x 4", "12 x 8", "6 x 16"]
        assert micro.setting("12 x 8").words == ("--batch-size", "12", "--accumulate", "8")
        assert micro.is_rounding
    assert "batch" not in known(levers)  # a larger one takes more memory
    odd = levers_of_train([], objective="memory", device=CPU, run=TrainFacts(7))
    assert "micro-batch" not in known(odd)
    for flag in ("--batch-size=64", "--accumulate"):  # a file for --config cannot take it back
        given = levers_of_train([flag, "2"], objective="throughput", device=CPU, run=TrainFacts(64))
        assert not {"micro-batch", "batch"} & set(known(given))


@pytest.mark.parametrize(
    ("workers", "data_wait", "is_tried"),
    [(0, 0.01, False), (0, 0.3, True), (0, None, True), (2, 0.01, True)],
)
def test_workers_are_tried_where_they_could_help(
    workers: int, data_wait: float | None, is_tried: bool
) -> None:
    """Fewer of them may help a run that has some, for they take CPUs from the model."""
    run = TrainFacts(64, 1, workers, data_wait)
    levers = levers_of_train([], objective="throughput", device=CPU, run=run)
    assert ("workers" in known(levers)) is is_tried
    assert f"{workers}" not in known(levers).get("workers", [])  # as it is


def test_what_the_model_does_is_tried_first_where_data_are_there_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flambeau.tune.search.levers.usable_cpus", lambda: 16)
    monkeypatch.setattr("flambeau.tune.search.levers.native_bf16", lambda device: True)

    def names(data_wait: float) -> list[str]:
        run = TrainFacts(64, 1, 4, data_wait)
        found = known(levers_of_train([], objective="throughput", device=CUDA, run=run))
        counts = {0.3: ["0", "1", "2", "8", "16", "32"], 0.01: ["0", "1", "2", "8"]}
        assert found["workers"] == counts[data_wait]
        return [name for name in found if name in ("workers", "precision", "compile")]

    assert names(0.3) == ["workers", "precision", "compile"]
    assert names(0.01) == ["precision", "compile", "workers"]


@pytest.mark.parametrize(("smaller", "chosen"), [(0.5, True), (1.1, False)])
def test_a_smaller_forward_pass_is_chosen_where_it_is_faster(smaller: float, chosen: bool) -> None:
    levers = levers_of_train([], objective="memory", device=CPU, run=TrainFacts(64))
    machine = Machine({("micro-batch", "32 x 2"): smaller, ("recompute", "*"): 0.9})
    one = Search(machine.measure, rounds=3, is_over=lambda more: False, left_s=1e6, loss_bound=0.05)
    found = one.run(levers, first=machine.measure({}))
    assert ("micro-batch" in found.choice) is chosen
    assert found.choice["recompute"] == "*"


GPU_ONLY = {"pin memory", "cudnn.benchmark"}


def test_levers_of_a_script_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flambeau.tune.search.levers.native_bf16", lambda device: True)
    on_cpu, on_gpu = (known(levers_of_script(device)) for device in (CPU, CUDA))
    assert not GPU_ONLY & set(on_cpu)
    assert set(on_gpu) >= GPU_ONLY
    for levers in (on_cpu, on_gpu):
        assert levers["prefetch"] == ["4", "8"]
        assert levers["optimizer"] == ["foreach", "fused"]
    changes = {s.value: dict(s.change) for one in levers_of_script(CUDA) for s in one.settings}
    assert changes["foreach"] == {"foreach": True} and changes["8"] == {"prefetch": 8}


@pytest.mark.parametrize(
    ("name", "value"),
    [("prefetch", "8"), ("pin memory", "yes"), ("cudnn.benchmark", "yes"), ("optimizer", "foreach"),
     ("optimizer", "fused"), ("channels_last", "yes"), ("persistent workers", "yes"), ("workers", "2")],
)  # fmt: skip
def test_each_lever_of_a_script_is_chosen_where_it_helps(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flambeau.tune.search.levers.native_bf16", lambda device: True)
    machine = Machine({(name, value): 0.7}, noise=0.001)
    one = Search(machine.measure, rounds=3, is_over=lambda more: False, left_s=1e6, loss_bound=0.05)
    found = one.run(levers_of_script(CUDA), first=machine.measure({}))
    assert found.choice[name] == value


def test_levers_that_the_user_has_set_are_left_alone() -> None:
    cpu = torch.device("cpu")
    names = {one.name for one in levers_of_train([], objective="throughput", device=cpu)}
    assert "workers" in names
    given = ["--workers=3", "--compile"]
    left = {one.name for one in levers_of_train(given, objective="throughput", device=cpu)}
    assert left == names - {"workers", "compile"}


def test_levers_of_a_gpu_have_its_precisions_and_no_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flambeau.tune.search.levers.native_bf16", lambda device: True)
    gpu = torch.device("cuda")
    known = {one.name: one for one in levers_of_train([], objective="throughput", device=gpu)}
    assert [s.value for s in known["precision"].settings] == ["tf32", "fp16"]
    assert "threads" not in known and "compile" in known
    of_script = {one.name: one for one in levers_of_script(gpu)}
    assert [dict(s.change) for s in of_script["precision"].settings] == [
        {"tf32": True}, {"autocast": "bfloat16"},
    ]  # fmt: skip


def test_a_script_whose_workers_would_give_every_sample_keeps_their_number() -> None:
    def names(loader: LoaderFacts | None) -> dict[str, Lever]:
        return {one.name: one for one in levers_of_script(torch.device("cpu"), loader)}

    assert not {"workers", "persistent workers"} & set(names(LoaderFacts(repeats=True)))
    assert {"workers", "persistent workers"} <= set(names(None))
    shared = names(LoaderFacts(repeats=False, shared=("__main__.Records",)))
    assert all(one.change["shared"] == ["__main__.Records"] for one in shared["workers"].settings)


def test_what_is_faster_while_other_programs_run_is_not_chosen() -> None:
    machine = Machine({("threads", "1"): 0.2})

    def busy(choice: Choice) -> Measured:
        return replace(machine.measure(choice), others_cpus=1.5)

    one = Search(busy, rounds=3, is_over=lambda more: False, left_s=3600.0, loss_bound=0.05)
    found = one.run(LEVERS, first=busy({}))
    (threads,) = [step for step in found.steps if step.lever == "threads"]
    assert found.choice == {} and search(machine).choice == {"threads": "1"}
    assert threads.note == "not judged: other programs kept 1.5 CPUs busy"


def test_what_is_far_worse_takes_one_trial() -> None:
    machine = Machine({("threads", "1"): 3.0})
    one = Search(machine.measure, rounds=3, is_over=lambda _: False, left_s=1.0, loss_bound=0.05)
    found = one.run([lever("threads", "1")], first=machine.measure({}))
    assert found.choice == {} and machine.trials == 2


def test_only_what_a_script_uses_is_changed() -> None:
    def names(facts: LoaderFacts) -> dict[str, Lever]:
        return {one.name: one for one in levers_of_script(torch.device("cpu"), facts)}

    of_loader = {"workers", "persistent workers", "prefetch"}
    without = names(LoaderFacts(repeats=False, num_workers=0))
    assert of_loader & set(without) == {"workers"}
    assert "0" not in {setting.value for setting in without["workers"].settings}
    some = names(LoaderFacts(repeats=False, num_workers=1))
    assert of_loader <= set(some)
    assert {"0", "2"} <= {setting.value for setting in some["workers"].settings}
    assert not of_loader & set(names(LoaderFacts(repeats=False, is_used=False)))
