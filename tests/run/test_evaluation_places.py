"""Evaluations wherever a loop may make them: each line is written once, whenever the run is stopped."""

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
