"""Evaluations wherever a loop may make them: each line is written once, whenever the run is stopped."""

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau import Run

POINTS = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
INSIDE = (POINTS.norm(dim=1) < 1).long()
TRAIN = TensorDataset(POINTS[:64], INSIDE[:64])
TEST = TensorDataset(POINTS[64:], INSIDE[64:])
STEPS_PER_EPOCH = 4


class Stop(Exception):
    """Stands for a kill."""


def evaluate(run: Run, name: str, *, signal_in: bool = False) -> None:
    for number, (x, y) in enumerate(run.evaluate(TEST)):
        run.log(**{name: run.model(x).argmax(1) == y})
        if signal_in and number == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train(
    folder: Path,
    *,
    start: bool = False,
    within: int | None = None,
    end: bool = False,
    at: Callable[[Run, str], None] = lambda run, where: None,
    **settings: Any,
) -> Run:
    """A loop that evaluates at the start of an epoch, after some of its steps, and at its end.

    Args:
        within: after this step of each epoch.
        at: called with the run and a place in the loop, where it may stop it.
    """
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    options = {
        "batch_size": 16,
        "log_every": 3,
        "bar": False,
        "checkpoint_every": "1st",
        **settings,
    }
    run = Run(folder, model, optimizer, TRAIN, duration="3ep", **options)
    for _ in run.epochs():
        if start:
            at(run, "start")
            evaluate(run, "start_accuracy")
        for x, y in run.batches():
            run.step(cross_entropy(model(x), y))
            at(run, "step")
            if within is not None and run.state.step % STEPS_PER_EPOCH == within:
                evaluate(run, "val_accuracy")
        if end:
            at(run, "end")
            evaluate(run, "end_accuracy")
    return run


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    clock = {"images_per_s", "data_wait"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def stop_at(step: int, where: str, *, kill: bool) -> Callable[[Run, str], None]:
    def at(run: Run, place: str) -> None:
        if (run.state.step, place) == (step, where):
            if kill:
                raise Stop
            os.kill(os.getpid(), signal.SIGTERM)

    return at


def stopped_and_resumed(folder: Path, at: Callable[[Run, str], None], **settings: Any) -> Run:
    with pytest.raises((Stop, SystemExit)):
        train(folder, at=at, **settings)
    return train(folder, **settings)


@pytest.fixture(autouse=True)
def _no_signal_is_left() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_plateau_goes_on_after_an_evaluation_in_mid_epoch(tmp_path: Path, step: int) -> None:
    settings = {"within": 2, "schedule": "plateau"}
    whole = train(tmp_path / "whole", **settings)
    at = stop_at(step, "step", kill=True)
    resumed = stopped_and_resumed(tmp_path / "resumed", at, **settings)
    assert rows(tmp_path / "resumed") == rows(tmp_path / "whole")
    assert torch.equal(resumed.model.weight, whole.model.weight)


PLACES: dict[str, dict[str, Any]] = {
    "start": {"start": True},
    "within": {"within": 2},
    "after the last step": {"within": 0},
    "all": {"start": True, "within": 2, "end": True},
}


@pytest.mark.parametrize(
    ("place", "kill", "every"),
    [
        *(("all", kill, every) for kill in (True, False) for every in ("1st", "3ep")),
        *((place, True, "1st") for place in PLACES if place != "all"),
        *((place, False, "3ep") for place in PLACES if place != "all"),
    ],
)
def test_each_line_is_written_once(tmp_path: Path, place: str, kill: bool, every: str) -> None:
    settings = {**PLACES[place], "checkpoint_every": every, "best": "start_accuracy"}
    whole = train(tmp_path / "whole", **settings)
    expected = rows(tmp_path / "whole")
    places = {"start": (0, 4, 8), "step": (4, 6, 7), "end": (8, 12)}
    stops = [(where, step) for where, steps in places.items() for step in steps]
    for where, step in stops:
        if where != "step" and not settings.get(where):
            continue
        folder = tmp_path / f"{where}-{step}"
        resumed = stopped_and_resumed(folder, stop_at(step, where, kill=kill), **settings)
        assert rows(folder) == expected, (where, step)
        assert torch.equal(resumed.model.weight, whole.model.weight)
        assert resumed.state.best.step == whole.state.best.step


def test_an_evaluation_before_the_epochs_has_one_line(tmp_path: Path) -> None:
    def go(stop: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = Run(tmp_path, model, optimizer, TRAIN, duration="2ep", batch_size=16, bar=False)
        evaluate(run, "untrained_accuracy")
        for _ in run.epochs():
            for x, y in run.batches():
                run.step(cross_entropy(model(x), y))
                if run.state.step == stop:
                    raise Stop

    for stop in (2, 6, -1):
        with contextlib.suppress(Stop):
            go(stop)
    assert [row["step"] for row in rows(tmp_path) if "untrained_accuracy" in row] == [0]


def test_an_evaluation_after_the_epochs_is_shown_and_said_to_be_in_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # as the run ends, and on a finished run
        run = train(tmp_path / "run")
        before = rows(tmp_path / "run")
        evaluate(run, "test_accuracy")
        assert rows(tmp_path / "run") == before
        assert "test_accuracy" in run.state.metrics
        text = capfd.readouterr().err
        assert "is shown, and is not in metrics.jsonl" in text
        assert "test_accuracy " in text


def test_an_evaluation_after_a_break_writes_no_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run = Run(tmp_path, model, optimizer, TRAIN, duration="2ep", batch_size=16, bar=False)
    for epoch in run.epochs():
        for x, y in run.batches():
            run.step(cross_entropy(model(x), y))
        if epoch == 0:
            break
    files = sorted(tmp_path.rglob("*"))
    evaluate(run, "val_accuracy")
    assert sorted(tmp_path.rglob("*")) == files
