"""A small run with trackers, which a test may have killed, and the curves that it should have."""

import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau import Run
from flambeau.run.trackers import run_trackers, wandb_run

# Time is never the same twice.
_OF_TIME = {"images_per_s", "data_wait"}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take longer than users are to wait."""
    monkeypatch.setattr(run_trackers, "END_WAIT_S", 300.0)
    monkeypatch.setattr(wandb_run, "_INIT_S", 200.0)
    monkeypatch.setattr(wandb_run, "_FINISH_S", 200.0)


def small_run(
    folder: Path,
    track: Any,
    *,
    kill_at: int | None = None,
    until: Callable[[], bool] = lambda: True,
    bad_at: int | None = None,
    duration: str = "4ep",
    **options: Any,
) -> Run:
    """Train 4 steps per epoch, a line for each and one per evaluation; kill this process at a step, or not.

    `until` is waited for before that, as long as the threads of trackers take; `bad_at` is the step whose
    loss is NaN, once.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(64, 1, 4, 4, generator=generator)
    data = TensorDataset(images, torch.randint(3, (64,), generator=generator))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    groups = [
        {"params": [p], "lr": lr} for p, lr in zip(model.parameters(), (0.1, 0.2), strict=True)
    ]
    optimizer = torch.optim.SGD(groups)
    options = {"batch_size": 16, "log_every": 1, "bar": False, **options}
    run = Run(folder, model, optimizer, data, duration=duration, track=track, **options)
    for _ in run.epochs():
        for x, y in run.batches():
            loss = cross_entropy(model(x), y)
            if run.state.step + 1 == bad_at and not run.state.rollbacks:
                loss = loss * float("nan")
            run.step(loss)
            if run.state.step == kill_at:
                deadline = time.monotonic() + 20
                while not until() and time.monotonic() < deadline:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        for x, y in run.evaluate(data):
            logits = model(x)
            losses = cross_entropy(logits, y, reduction="none")
            run.log(val_loss=losses, val_accuracy=logits.argmax(1) == y)
    return run


@pytest.fixture
def train() -> Callable[..., Run]:
    """The function `small_run`."""
    return small_run


@pytest.fixture
def killed() -> Callable[..., None]:
    """Run `small_run` in a fork that kills itself: `killed(folder, track, kill_at=6)`."""

    def start(*arguments: Any, before: Callable[[], None] = lambda: None, **options: Any) -> None:
        def work() -> None:
            before()
            small_run(*arguments, **options)

        process = multiprocessing.get_context("fork").Process(target=work)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork beside threads
            process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL

    return start


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def points() -> Callable[[Path], list[tuple[int, dict[str, float]]]]:
    """The lines of a run as trackers get them, without what is measured by the clock."""

    def read(folder: Path) -> list[tuple[int, dict[str, float]]]:
        found = []
        for line in lines_of(folder):
            step = line.pop("step")
            for index, rate in enumerate(line.pop("learning_rates", [])):
                line[f"learning_rates/{index}"] = rate
            found.append((step, {k: v for k, v in line.items() if k not in _OF_TIME}))
        return found

    return read


@pytest.fixture
def timeless() -> Callable[[dict[str, float]], dict[str, float]]:
    """Figures without what is measured by the clock."""
    return lambda figures: {k: v for k, v in figures.items() if k not in _OF_TIME}
