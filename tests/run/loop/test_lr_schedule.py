"""The schedules of the command, over whole runs and at their borders; 'plateau' over kills."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, lr_scheduler
from torch.utils.data import TensorDataset

from flambeau.errors import InputError
from flambeau.recipes.training.plateau import ReduceOnPlateau
from flambeau.run.loop.lr_schedule import SCHEDULES, LRSchedule, schedule_of
from flambeau.run.loop.step_plan import StepPlan
from flambeau.run.options.named_schedule import NamedSchedule
from flambeau.run.run import Run
from flambeau.trainer.fit import make_schedule
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import FIELDS, Settings


def rates(name: str, *, total: int = 100, warmup: str = "10%") -> list[float]:
    plan = StepPlan(steps_per_epoch=10, duration=f"{total}st", checkpoint_every="1ep", log_every=10)
    schedule = schedule_of(plan, name, warmup=warmup)
    return [schedule(step) for step in range(total)]


def test_every_name_of_the_command_is_known() -> None:
    assert set(FIELDS["schedule"].metadata["choices"]) == {*SCHEDULES, "plateau"}


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize(("total", "warmup"), [(100, "10%"), (11, "1st"), (1000, "99st")])
def test_each_starts_above_0_and_peaks_at_1(name: str, total: int, warmup: str) -> None:
    values = rates(name, total=total, warmup=warmup)
    assert min(values) > 0
    assert max(values) == pytest.approx(1.0)
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    if name == "cosine-restarts":
        assert values.count(1.0) == 3
    else:  # never grows again
        assert values[top:] == sorted(values[top:], reverse=True)


def test_where_they_turn() -> None:
    assert rates("wsd")[79:82] == pytest.approx([1.0, 1.0, 1 - (1 / 20) ** 0.5])
    assert rates("one-cycle", warmup="30%").index(1.0) == 29  # OneCycleLR's pct_start
    assert [k for k, v in enumerate(rates("cosine-restarts", total=70, warmup="0st")) if v == 1.0] == [
        0, 10, 30,
    ]  # fmt: skip
    assert rates("polynomial", warmup="0st")[50] == 0.25


@pytest.mark.parametrize(
    ("name", "total", "warmup", "message"),
    [
        ("one-cycle", 10, "0st", "rises over the warm-up, which is 0 steps"),
        ("cosine-restarts", 6, "0st", "6 steps after the warm-up are too few for 3 cycles"),
        ("cosinus", 10, "0st", "plateau or a function, got 'cosinus'"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(
    name: str, total: int, warmup: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        rates(name, total=total, warmup=warmup)


@pytest.mark.parametrize(
    "name", ["constant", "linear", "cosine", "polynomial", "wsd", "cosine-restarts"]
)
def test_a_run_of_one_step(name: str) -> None:
    if name == "cosine-restarts":
        with pytest.raises(InputError, match="too few"):
            rates(name, total=1)
    else:
        assert rates(name, total=1) == [1.0]


# ---------------------------------------------------------------- plateau


class Stop(Exception):
    """Stands for a kill: nothing of the run is saved on the way out."""


ACCURACIES = [0.5, 0.6, 0.6, 0.6, 0.7, 0.6, 0.7, 0.6, 0.6, 0.6]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(6, 2)


def data() -> TensorDataset:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] > 0).long())


def train(folder: Path, *, stop_at: tuple[int, int] | None = None, **settings: Any) -> None:
    """Four steps an epoch; the accuracies are the list's. `stop_at`: epoch, and steps or 5: evaluated."""
    model = network()
    settings = {
        "schedule": ReduceOnPlateau(mode="max", patience=1, factor=0.5), "warmup": "6st", **settings
    }  # fmt: skip
    run = Run(
        folder, model, SGD(model.parameters(), lr=0.2, momentum=0.9), data(), batch_size=4,
        duration=f"{len(ACCURACIES)}ep", log_every=1, bar=False, **settings,
    )  # fmt: skip
    try:
        for epoch in run.epochs():
            for step, (x, y) in enumerate(run.batches()):
                if stop_at == (epoch, step):
                    raise Stop
                run.step(F.cross_entropy(model(x), y))
            for _ in run.evaluate(data()):
                run.log(val_accuracy=ACCURACIES[epoch])
            if stop_at == (epoch, 5):
                raise Stop
    finally:
        run.close()


def rates_of(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["learning_rate"] for line in lines if "learning_rate" in line]


def test_plateau_equals_torch_behind_a_warmup(whole: Path) -> None:
    peer = SGD(network().parameters(), lr=0.2)
    scheduler = lr_scheduler.ReduceLROnPlateau(peer, mode="max", patience=1, factor=0.5)
    wanted = []
    for epoch, accuracy in enumerate(ACCURACIES):
        for step in range(4 * epoch, 4 * epoch + 4):
            wanted.append(peer.param_groups[0]["lr"] * min(1.0, (step + 1) / 7))
        scheduler.step(accuracy)
    assert rates_of(whole) == pytest.approx(wanted)
    assert wanted[-1] == 0.025  # it has fallen three times


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plateau") / "whole"
    train(folder, checkpoint_every="40st")
    return folder


@pytest.mark.parametrize(("stop_at", "every"), [((4, 0), "1ep"), ((5, 5), "8st"), ((8, 3), "7st")])
def test_a_resume_is_exact(
    tmp_path: Path, whole: Path, stop_at: tuple[int, int], every: str
) -> None:
    with pytest.raises(Stop):
        train(tmp_path / "killed", stop_at=stop_at, checkpoint_every=every)
    train(tmp_path / "killed", checkpoint_every=every)
    assert rates_of(tmp_path / "killed") == rates_of(whole)
    found, wanted = (
        safetensors.torch.load_file(folder / "model.safetensors")
        for folder in (tmp_path / "killed", whole)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_a_reduction_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, checkpoint_every="40st")
    said = [line for line in capsys.readouterr().err.splitlines() if "stopped improving" in line]
    assert said == [
        "val_accuracy has stopped improving: the learning rate is now 0.5 of its base",
        "val_accuracy has stopped improving: the learning rate is now 0.25 of its base",
        "val_accuracy has stopped improving: the learning rate is now 0.125 of its base",
    ]


def test_plateau_by_name(tmp_path: Path) -> None:
    train(tmp_path, schedule="plateau", warmup="0st", checkpoint_every="40st")
    # The best is of epoch 5, three epochs are put up with, and the ninth was the fourth.
    assert rates_of(tmp_path)[-5:] == pytest.approx([0.2, 0.02, 0.02, 0.02, 0.02])
    assert 'schedule = "plateau"' in (tmp_path / "config.toml").read_text()


@pytest.mark.parametrize(
    ("logged", "message"), [("val_loss", "was not logged"), ("val_accuracy", "it was NaN")]
)
def test_plateau_without_its_metric(tmp_path: Path, logged: str, message: str) -> None:
    model = network()
    run = Run(
        tmp_path, model, SGD(model.parameters(), lr=0.1), data(), duration="1ep", schedule="plateau",
        bar=False,
    )  # fmt: skip

    def loop() -> None:
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(F.cross_entropy(model(x), y))
            for _ in run.evaluate(data()):
                run.log(**{logged: float("nan")})

    with pytest.raises(InputError, match=message):
        loop()


RESOLVED: dict[str, Any] = {
    "image_size": 8, "workers": 0, "model": "small_convnet", "duration": "2ep", "batch_size": 4,
    "lr": 0.1,
}  # fmt: skip


def test_settings_reach_the_plateau() -> None:
    made = make_schedule(
        ResolvedSettings(**RESOLVED, schedule="plateau", patience=0, plateau_factor=0.5)
    )
    assert isinstance(made, ReduceOnPlateau)
    assert [made.step(0.5), made.step(0.5), made.step(0.6)] == [1.0, 0.5, 0.5]
    assert make_schedule(ResolvedSettings(**RESOLVED, schedule="wsd")) == NamedSchedule("wsd")
    told = {"schedule": "multistep", "gamma": 0.2, "milestones": "2ep,75%"}
    made = make_schedule(ResolvedSettings(**RESOLVED, **told))
    assert str(made) == "multistep(gamma=0.2, milestones=2ep,75%)"


PLAN = StepPlan(steps_per_epoch=10, duration="8ep", checkpoint_every="1ep", log_every=10)


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (
            NamedSchedule("multistep", gamma=0.2, milestones=("2ep", "75%", "70st")),
            lambda step: 0.2 ** ((step >= 20) + (step >= 60) + (step >= 70)),
        ),
        (NamedSchedule("multistep"), lambda step: 0.1 ** ((step >= 40) + (step >= 60))),
        (NamedSchedule("exponential", gamma=0.7), lambda step: 0.7 ** (step / 10)),
        (NamedSchedule("exponential"), lambda step: 0.9 ** (step / 10)),
    ],
)
def test_schedules_with_numbers(told: NamedSchedule, wanted: Callable[[int], float]) -> None:
    schedule = LRSchedule(PLAN, told, warmup="0st", metric="val_accuracy", mode="max")
    assert [schedule(step) for step in range(80)] == pytest.approx(list(map(wanted, range(80))))


def test_the_exponential_one_equals_torch_behind_a_warmup() -> None:
    told = NamedSchedule("exponential", gamma=0.5)
    schedule = LRSchedule(PLAN, told, warmup="1ep", metric="val_accuracy", mode="max")
    peer = SGD(network().parameters(), lr=1.0)
    scheduler = lr_scheduler.ExponentialLR(peer, gamma=0.5)
    for epoch in range(1, 8):
        assert schedule(10 * epoch) == pytest.approx(peer.param_groups[0]["lr"])
        peer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("cosine", {"gamma": 0.5}, "gamma has no effect with schedule = 'cosine'"),
        ("exponential", {"milestones": ["3ep"]}, "milestones has no effect with schedule = 'expo"),
        ("multistep", {"gamma": 0.0}, "gamma must be above 0 and at most 1, got 0.0"),
        ("multistep", {"milestones": ["3"]}, "milestones must be a duration such as"),
        ("multistep", {"milestones": ["50%", "4ep"]}, "'50%,4ep' name step 40 twice"),
        ("multistep", {"milestones": ["9ep"]}, "9ep is step 90, which is not after the warm-up"),
        ("multistep", {"milestones": ["1st"]}, "1st is step 1, which is not after the warm-up"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(
    name: str, numbers: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        LRSchedule(
            PLAN, NamedSchedule(name, **numbers), warmup="1ep", metric="val_accuracy", mode="max"
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 3}, "patience has no effect with schedule = 'cosine'"),
        ({"plateau_factor": 0.5}, "plateau_factor has no effect with schedule = 'cosine'"),
        ({"schedule": "plateau", "patience": -1}, "patience must be at least 0, got -1"),
        ({"schedule": "plateau", "plateau_factor": 1.0}, "above 0 and below 1, got 1.0"),
        ({"gamma": 0.5}, "gamma has no effect with schedule = 'cosine'"),
        ({"milestones": "3ep"}, "milestones has no effect with schedule = 'cosine'"),
        ({"optimizer": "sgd", "betas": "0.9,0.95"}, "betas has no effect with optimizer = 'sgd'"),
        ({"optimizer": "adamw", "betas": "0.9"}, "betas must be two numbers from 0 to below 1"),
        ({"optimizer": "adamw", "betas": "0.9,1"}, "betas must be two numbers from 0 to below 1"),
        ({"schedule": "one_cycle"}, "did you mean 'one-cycle'"),
    ],
)
def test_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Settings(**settings)
