"""Whole runs on a GPU: equal bits, no waiting, out of memory, and `train` as a user types it."""

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, TensorDataset

from flambeau import Run
from flambeau.recipes.parallel import fixed_order_sum
from flambeau.recipes.parallel.sync_batchnorm import convert_sync_batchnorm
from flambeau.recipes.training.graph_replay import GraphReplay
from flambeau.run.folder.checkpointer import restore

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
Flambeau = Callable[..., Any]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def some_data(length: int = 54, seed: int = 1) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(length, 3, 6, 6, generator=generator)
    return TensorDataset(images, (images.mean((1, 2, 3)) * 20).long().remainder(5))


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(96, 5)
    ).cuda()  # fmt: skip


def train(
    folder: Path, *, stop_at: int | None = None, synced: bool = False, **options: Any
) -> None:
    """Three epochs of four steps; left after `stop_at` steps as by a kill."""
    model = convert_sync_batchnorm(a_model()) if synced else a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {
        "batch_size": 16, "duration": "3ep", "checkpoint_every": "2st", "log_every": 3, "ema": 0.9,
        "clip_norm": 0.5, "schedule": "cosine", "bar": False, "best": "val_accuracy",
    } | options  # fmt: skip
    run = Run(folder, model, optimizer, some_data(), **settings)
    assert run.device.type == "cuda"

    def loss_of(batch: Any) -> Tensor:
        images, targets = batch
        assert images.is_cuda
        with run.autocast():
            logits = model(images)
            loss = cross_entropy(logits, targets)
        run.log(share=logits.softmax(1).max(1).values)
        return loss

    for _ in run.epochs():
        for step in run.steps(loss_of):
            if step == stop_at:
                run.close()
                return
        for images, targets in run.evaluate(some_data(23, 2)):
            run.log(val_accuracy=model(images).argmax(1) == targets)


def outcome(folder: Path) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Lines without what differs from one run to the next, and the newest checkpoint."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [
        {k: v for k, v in row.items() if k not in ("images_per_s", "data_wait")} for row in rows
    ]
    found = restore(sorted((folder / "checkpoints").glob("step-*"))[-1])
    return lines, {"model": found.model, "ema": found.ema, "optimizer": found.state["optimizer"]}


def assert_equal(folder: Path, expected: Path) -> None:
    (lines, state), (lines_of_it, state_of_it) = outcome(folder), outcome(expected)
    assert lines == lines_of_it
    torch.testing.assert_close(state, state_of_it, rtol=0, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path: Path, precision: str) -> None:
    train(tmp_path / "whole", precision=precision)
    for stop_at in (3, 6, None):
        train(tmp_path / "resumed", precision=precision, stop_at=stop_at)
    assert_equal(tmp_path / "resumed", tmp_path / "whole")


class _Done:
    """What stands for the handle of an exchange that is over."""

    def wait(self) -> None:
        pass


def through_the_host(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """The same over copies on the CPU: NCCL wants a GPU for each process."""

    def call(*given: Any, async_op: bool = False, **named: Any) -> _Done | None:
        copies = tree_map_only(Tensor, Tensor.cpu, list(given))
        exchange(*copies, **named)
        flat = torch.utils._pytree.tree_leaves
        for one, copied in zip(flat(list(given)), flat(copies), strict=True):
            if isinstance(one, Tensor):
                one.copy_(copied)
        return _Done() if async_op else None

    return call


def train_as_a_rank(folder: Path, stop_at: int | None, synced: bool) -> None:
    """One of several processes on the one GPU."""
    for module, name in (
        (dist, "all_to_all_single"), (dist, "all_gather"), (dist, "all_reduce"), (dist, "broadcast"),
        (fixed_order_sum, "_all_gather"),
    ):  # fmt: skip
        setattr(module, name, through_the_host(getattr(module, name)))
    torch.use_deterministic_algorithms(True)
    train(folder, stop_at=stop_at, synced=synced, parts=4)


@pytest.mark.parametrize("plan", [[(4, 3), (1, 6), (3, None)]])
@pytest.mark.parametrize("synced", [False, True])
def test_parts_have_the_same_bits_in_other_processes(
    tmp_path: Path, plan: Sequence[tuple[int, int | None]], synced: bool
) -> None:
    train(tmp_path / "alone", synced=synced, parts=4)
    for world, stop_at in plan:
        launch = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}",
            __file__, f"{tmp_path / 'moved'}", f"{stop_at or 0}", f"{int(synced)}",
        ]  # fmt: skip
        done = subprocess.run(launch, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    assert_equal(tmp_path / "moved", tmp_path / "alone")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_most_steps_are_replays_of_the_same_bits(
    tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learn(folder: str) -> tuple[dict[str, Any], int]:
        torch.manual_seed(0)
        model = a_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
        run = Run(
            tmp_path / folder, model, optimizer, some_data(512), batch_size=16, duration="3ep", bar=False,
            log_every=40, precision=precision, ema=0.9, clip_norm=0.5, schedule="cosine",
        )  # fmt: skip
        for _ in run.epochs():
            for images, targets in run.batches():
                with run.autocast():
                    loss = cross_entropy(model(images), targets)
                run.log(one=loss.detach())
                run.step(loss)
        replays = run.state.amp._replay
        assert isinstance(replays, GraphReplay)
        return copy.deepcopy(model.state_dict()), replays.num_replays

    got, num_replays = learn("replayed")
    monkeypatch.setattr(GraphReplay, "_record", lambda self, work: None)
    expected, none = learn("run")
    assert none == 0
    assert num_replays >= 60, f"of 96 steps {num_replays} were replays"
    for name, value in got.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("parts", "synced"), [(None, False), (4, False), (4, True)])
def test_no_step_between_two_lines_waits(
    tmp_path: Path, precision: str, parts: int | None, synced: bool
) -> None:
    torch.use_deterministic_algorithms(False)
    model = convert_sync_batchnorm(a_model()) if synced else a_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    told: dict[str, Any] = {} if parts is None else {"parts": parts}
    run = Run(
        tmp_path / "run", model, optimizer, some_data(400), batch_size=16, duration="1ep", log_every=1000,
        precision=precision, ema=0.9, clip_norm=0.5, schedule="cosine", bar=False, **told,
    )  # fmt: skip
    counted = 0

    def loss_of(batch: Any) -> Tensor:
        images, targets = batch
        with run.autocast():
            logits = model(images)
            loss = cross_entropy(logits, targets)
        run.log(share=logits.detach().softmax(1).max(1).values)
        return loss

    try:
        for _ in run.epochs():
            for step in run.steps(loss_of):
                counted += 1
                torch.cuda.set_sync_debug_mode("error" if 4 <= step < 20 else "default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counted == 25


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_step(tmp_path: Path) -> None:
    def learn(folder: Path, **options: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(64, 2**20, bias=False), nn.ReLU(), nn.Linear(2**20, 2, bias=False)
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        rows = torch.randn(256, 64, generator=torch.Generator().manual_seed(1))
        data = TensorDataset(rows, (rows[:, 0] > 0).long())
        settings = {
            "batch_size": 128,
            "duration": "3ep",
            "bar": False,
            "log_every": 1,
            "precision": "fp32",
        }
        run = Run(folder, model, optimizer, data, **settings | options)
        for _ in run.epochs():
            for images, targets in run.batches():
                with run.halving():
                    run.step(cross_entropy(model(images), targets))
        return copy.deepcopy(model.state_dict())

    expected = learn(tmp_path / "halves", accumulate=4)
    gc.collect()
    torch.cuda.empty_cache()
    # A quarter GiB each for weights, their gradients and those of the next micro-batch; the activations of
    # 128 samples, of which there are three copies in the backward pass, need twice that each.
    total = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + 1100 * 2**20
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        found = learn(tmp_path / "run")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    written = json.loads((tmp_path / "run" / "micro_batches.json").read_text())
    assert written["training"] in (16, 32, 64)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    steps = [
        json.loads(line)["step"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("words", ["--precision bf16", "--precision fp16 --ema 0.9", "--compile"])
def test_train_and_evaluate(flambeau: Flambeau, images: Path, tmp_path: Path, words: str) -> None:
    torch.use_deterministic_algorithms(False)
    run = tmp_path / "run"
    answer = flambeau("train", images, "--epochs 2 --batch-size 8 --out", run, words)
    assert answer.code == 0, answer
    assert 'device = "cuda"' in (run / "config.toml").read_text()
    answer = flambeau("evaluate", run, images, "--json")
    assert answer.code == 0, answer
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = max(line["val_accuracy"] for line in lines if "val_accuracy" in line)
    assert json.loads(answer.out)["accuracy"] == best


if __name__ == "__main__":
    train_as_a_rank(Path(sys.argv[1]), int(sys.argv[2]) or None, sys.argv[3] == "1")
