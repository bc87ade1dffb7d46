"""Runs with parts: the same bits and lines on any number of processes, and where that changes on the way."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from flambeau import Run
from flambeau.errors import InputError

StartRanks = Callable[..., Any]
TIMES = {"images_per_s", "data_wait"}


def some_data(length: int, seed: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(length, 3, 6, 6, generator=generator)
    return TensorDataset(images, (images.mean((1, 2, 3)) * 20).long().remainder(5))


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(96, 5)
    )  # fmt: skip


class Enough(Exception):
    """The loop is left here, as by a kill."""


def train(
    folder: Path, stop_at: int | None = None, *, logs_late: bool = False, **options: Any
) -> None:
    """A run of 3 epochs of 4 steps, the last one smaller; left after `stop_at` steps."""
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {
        "parts": 4, "batch_size": 16, "duration": "3ep", "checkpoint_every": "2st", "log_every": 3,
        "ema": 0.9, "clip_norm": 0.5, "schedule": "cosine", "bar": False, "best": "val_accuracy",
    } | options  # fmt: skip
    try:
        run = Run(folder, model, optimizer, some_data(54, 1), **settings)
        for _ in run.epochs():
            for images, targets in run.batches():
                with run.autocast():
                    logits = model(images)
                    loss = cross_entropy(logits, targets)
                run.log(share=logits.softmax(1).max(1).values, norm=logits.norm())
                run.step(loss)
                if logs_late:
                    run.log(late=loss.detach() * 3)
                if run.state.step == stop_at:
                    raise Enough
            for images, targets in run.evaluate(some_data(23, 2)):
                logits = model(images)
                run.log(val_accuracy=logits.argmax(1) == targets)
                run.log(val_loss=cross_entropy(logits, targets))
    except Enough:
        run.close()


def lines_of(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def states_of(folder: Path) -> dict[str, Any]:
    """All that the newest checkpoint has of weights, average and optimizer."""
    from flambeau.train.checkpoints.checkpointer import restore

    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    found = restore(newest)
    return {
        "model": found.model, "ema": found.ema, "optimizer": found.state["optimizer"]["state"],
        "step": found.state["step"], "order_crc": found.state["order_crc"],
    }  # fmt: skip


def assert_equal(left: Any, right: Any, path: str = "") -> None:
    if isinstance(left, Tensor):
        assert torch.equal(left, right), path
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), path
        for key in left:
            assert_equal(left[key], right[key], f"{path}/{key}")
    else:
        assert left == right, path


def compare(folder: Path, expected: Path) -> None:
    assert lines_of(folder) == lines_of(expected)
    assert_equal(states_of(folder), states_of(expected))


def play(start_ranks: StartRanks, folder: Path, world: int, *args: Any, **options: Any) -> None:
    if world == 1:
        train(folder, *args, **options)
    else:
        start_ranks(world, lambda: train(folder, *args, **options)).results()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_processes_makes_the_run_of_one(
    start_ranks: StartRanks, tmp_path: Path, world: int
) -> None:
    play(start_ranks, tmp_path / "alone", 1, logs_late=True)
    play(start_ranks, tmp_path / "ranks", world, logs_late=True)
    compare(tmp_path / "ranks", tmp_path / "alone")
    names = {name for line in lines_of(tmp_path / "alone") for name in line}
    assert {"train_loss", "share", "norm", "late", "val_accuracy", "val_loss"} <= names


@pytest.mark.parametrize("plan", [[(1, 3), (3, 7), (2, None)], [(4, 5), (1, 6), (4, None)]])
def test_the_number_may_change_on_the_way(
    start_ranks: StartRanks, tmp_path: Path, plan: Sequence[tuple[int, int | None]]
) -> None:
    play(start_ranks, tmp_path / "alone", 1)
    for world, stop_at in plan:
        play(start_ranks, tmp_path / "moved", world, stop_at)
    compare(tmp_path / "moved", tmp_path / "alone")


def test_parts_change_the_training_as_processes_do(start_ranks: StartRanks, tmp_path: Path) -> None:
    """What is equal above is not equal because nothing depends on it."""
    train(tmp_path / "four")
    train(tmp_path / "two", parts=2)
    assert lines_of(tmp_path / "four") != lines_of(tmp_path / "two")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"parts": 17}, r"parts = 17: each part of a step needs a sample, and batch_size = 16"),
        ({"parts": 0}, r"parts must be at least 1, got 0"),
        ({"accumulate": 2}, r"give batch_size=32, and leave accumulate out"),
        ({"micro_batch": 4}, r"leave micro_batch out"),
        ({"compression": "bf16"}, r"compression = 'bf16' rounds"),
        ({"metrics": {"auroc": object()}}, r"metrics\['auroc'\] gets the samples in an order"),
    ],
)
def test_what_parts_cannot_be_with_is_refused(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(InputError, match=what):
        train(tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()
