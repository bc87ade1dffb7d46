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
from flambeau.recipes.memory.activation_checkpointing import checkpoint_modules

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
    folder: Path,
    stop_at: int | None = None,
    *,
    logs_late: bool = False,
    prepared: Callable[[nn.Module], nn.Module] = lambda model: model,
    factor: Callable[[Run, Tensor], float] = lambda run, images: 1.0,
    **options: Any,
) -> None:
    """A run of 3 epochs of 4 steps, the last one smaller; left after `stop_at` steps."""
    model = prepared(a_model())
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
                    loss = cross_entropy(logits, targets) * factor(run, images)
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


def overflow(run: Run, images: Tensor) -> float:
    """Too much for fp16, in some parts of two steps."""
    return 1e35 if run.state.step in (1, 5) and images[0, 0, 0, 0] > 0 else 1.0


def nan_once(run: Run, images: Tensor) -> float:
    """In some parts of the seventh step; the run then stands in its second epoch."""
    is_bad = run.state.step == 6 and run.state.rollbacks == 0 and images[0, 0, 0, 0] > 0
    return float("nan") if is_bad else 1.0


def test_one_scale_for_all_parts(start_ranks: StartRanks, tmp_path: Path) -> None:
    told = {"precision": "fp16", "factor": overflow}
    play(start_ranks, tmp_path / "alone", 1, **told)
    assert lines_of(tmp_path / "alone")[-2]["loss_scale"] == 65536 / 4
    for world, stop_at in ((3, 6), (2, None)):
        play(start_ranks, tmp_path / "moved", world, stop_at, **told)
    compare(tmp_path / "moved", tmp_path / "alone")


@pytest.mark.parametrize("world", [2, 3])
def test_a_bad_part_takes_all_processes_back(
    start_ranks: StartRanks, tmp_path: Path, world: int
) -> None:
    told = {"on_nan": "rollback", "factor": nan_once}
    play(start_ranks, tmp_path / "alone", 1, **told)
    assert [line["bad_step"] for line in lines_of(tmp_path / "alone") if "bad_step" in line] == [7]
    play(start_ranks, tmp_path / "ranks", world, **told)
    compare(tmp_path / "ranks", tmp_path / "alone")


def recomputed(model: nn.Module) -> nn.Module:
    return checkpoint_modules(model, "0", "1")


@pytest.mark.parametrize(
    "prepared", [recomputed, pytest.param(torch.compile, marks=pytest.mark.slow)]
)
def test_modules_may_be_recomputed_or_compiled(
    start_ranks: StartRanks, tmp_path: Path, prepared: Callable[[nn.Module], nn.Module]
) -> None:
    told = {"prepared": prepared, "duration": "2ep"}
    # In a process of its own: one that has compiled cannot be forked.
    start_ranks(1, lambda: train(tmp_path / "alone", **told)).results(120.0)
    for world, stop_at in ((3, 3), (2, None)):
        job = start_ranks(world, lambda *a: train(tmp_path / "moved", *a, **told), stop_at)
        job.results(120.0)
    compare(tmp_path / "moved", tmp_path / "alone")
    if prepared is recomputed:
        train(tmp_path / "plain", duration="2ep")
        compare(tmp_path / "plain", tmp_path / "alone")


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
