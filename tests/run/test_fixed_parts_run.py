"""Runs with parts: the same bits and lines on any number of processes, and where that changes on the way."""

import json
import random
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from flambeau import Run
from flambeau.errors import InputError
from flambeau.recipes.memory.activation_checkpointing import checkpoint_modules
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm, revert_sync_batchnorm

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


class Draws(nn.Module):
    """Skips a layer, or adds noise, by Python's and NumPy's generators, as published networks do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if self.training and random.random() < 0.5:
            x = x * (1 + 0.1 * float(np.random.standard_normal()))
        out: Tensor = self.model(x)
        return out


class Enough(Exception):
    """The loop is left here, as by a kill."""


def train(
    folder: Path,
    stop_at: int | None = None,
    *,
    logs_late: bool = False,
    in_steps: bool = False,
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

        def loss_of(batch: Any) -> Tensor:
            images, targets = batch
            with run.autocast():
                logits = model(images)
                loss = cross_entropy(logits, targets) * factor(run, images)
            run.log(share=logits.softmax(1).max(1).values, norm=logits.norm())
            return loss

        for _ in run.epochs():
            for batch in run.batches() if not in_steps else ():
                loss = loss_of(batch)
                run.step(loss)
                if logs_late:
                    run.log(late=loss.detach() * 3)
                if run.state.step == stop_at:
                    raise Enough
            for step in run.steps(loss_of) if in_steps else ():
                if step == stop_at:
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
    """What the newest checkpoint has of weights, average and optimizer, and of torch's generator."""
    from flambeau.run.folder.checkpointer import restore

    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    found = restore(newest)
    return {
        "model": found.model, "ema": found.ema, "optimizer": found.state["optimizer"]["state"],
        "step": found.state["step"], "order_crc": found.state["order_crc"],
        "generator": found.state["rng"]["torch"],
        "other generators": repr((found.state["rng"]["python"], found.state["rng"]["numpy"])),
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


@pytest.mark.parametrize("is_synced", [False, True])
def test_a_part_draws_the_same_of_python_and_numpy_on_any_process(
    start_ranks: StartRanks, tmp_path: Path, is_synced: bool
) -> None:
    def prepared(model: nn.Module) -> nn.Module:
        return Draws(convert_sync_batchnorm(model) if is_synced else model)

    options: dict[str, Any] = {"prepared": prepared, "in_steps": is_synced}
    play(start_ranks, tmp_path / "alone", 1, **options)
    play(start_ranks, tmp_path / "ranks", 3, **options)
    compare(tmp_path / "ranks", tmp_path / "alone")


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


# ------------------------------------------------------------------------ SyncBatchNorm over all parts


def synced(model: nn.Module) -> nn.Module:
    """With a second normalization, before which dropout has drawn, and which is called twice."""
    norm = nn.BatchNorm2d(6)
    layers = [
        *list(model)[:3],
        nn.Dropout(0.2),
        nn.Conv2d(6, 6, 3, padding=1),
        norm,
        norm,
        *list(model)[3:],
    ]
    return convert_sync_batchnorm(nn.Sequential(*layers))


def synced_and_recomputed(model: nn.Module) -> nn.Module:
    return checkpoint_modules(synced(model), "0", "1", "3", "4", "5")


def short_run(
    folder: Path, model: nn.Module, *, data: Dataset[Any] | None = None, parts: int = 4
) -> Run:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Run(
        folder / "run", model, optimizer, data or some_data(54, 1), parts=parts, batch_size=16,
        duration="6st", bar=False,
    )  # fmt: skip


SYNCED: dict[str, Any] = {"in_steps": True, "prepared": synced}


@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_synced_statistics_are_equal_on_any_number_of_processes(
    start_ranks: StartRanks, tmp_path: Path, world: int
) -> None:
    play(start_ranks, tmp_path / "alone", 1, **SYNCED)
    play(start_ranks, tmp_path / "ranks", world, **SYNCED)
    compare(tmp_path / "ranks", tmp_path / "alone")
    counted = states_of(tmp_path / "alone")["model"]
    assert counted["1.num_batches_tracked"] == 12  # once a step, not once a part
    assert counted["5.num_batches_tracked"] == 24


def test_synced_parts_are_one_batch_with_plain_batchnorm(tmp_path: Path) -> None:
    """What the statistics of all parts are, without what each part draws for itself."""

    def prepared(model: nn.Module, convert: bool) -> nn.Module:
        model = synced(model) if convert else revert_sync_batchnorm(synced(model))
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.double()

    def train_double(folder: Path, convert: bool, parts: int) -> dict[str, Any]:
        model = prepared(a_model(), convert)
        run = short_run(folder, model, parts=parts)
        for _ in run.epochs():
            for _ in run.steps(lambda batch: cross_entropy(model(batch[0].double()), batch[1])):
                pass
        return dict(model.state_dict())

    whole = train_double(tmp_path / "whole", False, 1)
    parts = train_double(tmp_path / "parts", True, 4)
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-11)
    by_part = train_double(tmp_path / "by_part", False, 4)
    assert not torch.allclose(by_part["0.weight"], whole["0.weight"], rtol=1e-3)


@pytest.mark.parametrize(
    ("prepared", "options"),
    [
        (synced, {"precision": "fp16", "factor": overflow}),
        (synced, {"on_nan": "rollback", "factor": nan_once}),
        (synced_and_recomputed, {}),
    ],
    ids=["fp16", "rollback", "recomputed"],
)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # Dynamo looks at it
def test_synced_parts_go_on_elsewhere(
    start_ranks: StartRanks,
    tmp_path: Path,
    prepared: Callable[[nn.Module], nn.Module],
    options: dict[str, Any],
) -> None:
    told = {**SYNCED, "prepared": prepared, **options}
    play(start_ranks, tmp_path / "alone", 1, **told)
    for world, stop_at in ((3, 3), (1, 6), (2, None)):
        play(start_ranks, tmp_path / "moved", world, stop_at, **told)
    compare(tmp_path / "moved", tmp_path / "alone")
    if prepared is synced_and_recomputed:
        train(tmp_path / "plain", **SYNCED)
        compare(tmp_path / "plain", tmp_path / "alone")


@pytest.mark.parametrize("world", [1, 2])
def test_parts_that_need_each_other_are_not_for_a_loop(
    start_ranks: StartRanks, tmp_path: Path, world: int
) -> None:
    def refused() -> str:
        with pytest.raises(InputError) as caught:
            train(tmp_path / "run", prepared=synced)
        return str(caught.value)

    for said in [refused()] if world == 1 else start_ranks(world, refused).results():
        assert said.startswith("parts = 4: with SyncBatchNorm the parts of a step need each other")
        assert "run.steps(loss_of)" in said


def test_synced_parts_are_not_compiled(tmp_path: Path) -> None:
    def prepared(model: nn.Module) -> nn.Module:
        compiled = torch.compile(synced(model))
        assert isinstance(compiled, nn.Module)
        return compiled

    with pytest.raises(InputError, match="parts = 4: with SyncBatchNorm a compiled model is cut"):
        train(tmp_path / "run", in_steps=True, prepared=prepared)


def test_a_mistake_in_a_part_is_told_as_it_is_and_the_model_stays_whole(tmp_path: Path) -> None:
    model = synced(a_model())
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    run = short_run(tmp_path, model)
    seen: list[int] = []

    def loss_of(batch: Any) -> Tensor:
        loss = cross_entropy(model(batch[0]), batch[1])
        seen.append(len(seen))
        if len(seen) == 6:  # the second part of the second step
            raise KeyError("a mistake of mine")
        return loss

    threads = threading.active_count()
    with pytest.raises(KeyError, match="a mistake of mine") as caught:
        for _ in run.epochs():
            list(run.steps(loss_of))
    assert "in loss_of" in "".join(traceback.format_exception(caught.value))
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == before
    assert all(p.grad is None for p in model.parameters())
    assert threading.active_count() == threads
    assert run.state.step == 1


def test_parts_that_wait_are_ended_where_the_next_cannot_be_read(tmp_path: Path) -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 54

        def __getitem__(self, index: int) -> Any:
            if reads.append(index) or len(reads) == 16 + 10:  # the third part of the second step
                raise OSError("gone")
            return some_data(54, 1)[index]

    reads: list[int] = []
    model = synced(a_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(
        tmp_path / "run",
        model,
        optimizer,
        Broken(),
        parts=4,
        batch_size=16,
        duration="6st",
        bar=False,
    )
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    with pytest.raises(OSError, match="gone"):
        for _ in run.epochs():
            list(run.steps(lambda batch: cross_entropy(model(batch[0]), batch[1])))
    assert run.state.step == 1
    assert not [t for t in threading.enumerate() if t.name.startswith("flambeau-part")]
    assert all(p.grad is None for p in model.parameters())
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == before


def test_out_of_memory_in_a_part_ends_the_run(tmp_path: Path) -> None:
    model = synced(a_model())
    run = short_run(tmp_path, model)
    calls: list[int] = []

    def loss_of(batch: Any) -> Tensor:
        logits = model(batch[0])
        calls.append(len(calls))
        if len(calls) == 7:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return cross_entropy(logits, batch[1])

    with pytest.raises(InputError, match=r"out of memory in step 2: .* cannot be made smaller"):
        for _ in run.epochs():
            list(run.steps(loss_of))


def test_parts_that_do_not_meet_are_told(tmp_path: Path) -> None:
    model = synced(a_model())
    run = short_run(tmp_path, model)
    calls: list[int] = []

    def loss_of(batch: Any) -> Tensor:
        calls.append(len(calls))
        images = model(batch[0]) if len(calls) == 2 else batch[0]
        return cross_entropy(model(batch[0]), batch[1]) + images.mean() * 0

    with pytest.raises(
        InputError, match="parts = 4: the parts of a step passed through different Sync"
    ):
        for _ in run.epochs():
            list(run.steps(loss_of))


def test_steps_are_the_loop_over_batches(tmp_path: Path) -> None:
    train(tmp_path / "loop")
    train(tmp_path / "steps", in_steps=True)
    compare(tmp_path / "steps", tmp_path / "loop")
