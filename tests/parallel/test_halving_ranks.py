"""Out of memory in one of several processes: all leave, and the next start halves the micro-batches."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau.errors import InputError
from flambeau.parallel.preemption import OUT_OF_MEMORY
from flambeau.parallel.watchdog.watchdog import LOST_PEER
from flambeau.run.folder.micro_batches_file import MicroBatches
from flambeau.run.run import Run

StartRanks = Callable[..., Any]


class Limited(nn.Module):
    """One rank takes no more than so many samples at once, after some passes."""

    def __init__(self, most: int, *, rank: int, after: int = 0, evaluated: int = 10**9) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 2))
        self.most, self.rank, self.left, self.evaluated = most, rank, after, evaluated
        self.sizes: list[int] = []

    def forward(self, rows: Tensor) -> Tensor:
        self.left -= self.training
        is_here = int(os.environ.get("RANK", "0")) == self.rank
        most = self.most if self.training and self.left < 0 else 10**9
        if is_here and len(rows) > (most if self.training else self.evaluated):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if not self.training:
            self.sizes.append(len(rows))
        logits: Tensor = self.layers(rows)
        return logits


def train(folder: Path, model: nn.Module, **settings: Any) -> dict[str, Any]:
    """A run of three epochs of four steps, with a checkpoint after every second one."""
    x = torch.randn(61, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    run = Run(
        folder, model, optimizer, data,
        **{"duration": "3ep", "batch_size": 16, "log_every": 2, "checkpoint_every": "2st", **settings},
    )  # fmt: skip
    for _ in run.epochs():
        for rows, targets in run.batches():
            with run.halving():
                run.step(cross_entropy(model(rows), targets))
        for rows, targets in run.evaluate(data):
            with run.halving():
                run.log(val_loss=cross_entropy(model(rows), targets))
    return {"order": run.state.order_crc, "micro_batch": run.state.micro_batch}


def published(folder: Path) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("images_per_s", "data_wait")
    figures = [{name: row[name] for name in row if name not in clock} for row in rows]
    return load_file(folder / "model.safetensors"), figures


@pytest.mark.parametrize("rank", [0, 1])
def test_the_next_start_is_the_run_that_went_on_so(
    start_ranks: StartRanks, tmp_path: Path, rank: int
) -> None:
    """In step 7, the third of the second epoch; the newest checkpoint is that of step 6."""

    def limited() -> dict[str, Any]:
        return train(tmp_path / "run", Limited(5, rank=rank, after=6))

    job = start_ranks(2, limited)
    codes = job.codes()
    assert codes[rank] == OUT_OF_MEMORY
    assert codes[1 - rank] == LOST_PEER
    noted = MicroBatches.read(tmp_path / "run")
    assert noted == MicroBatches(step=7, training=8)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "out of memory in step 7" in events
    again = start_ranks(2, train, tmp_path / "run", Limited(99, rank=rank)).results()
    assert [answer["micro_batch"] for answer in again] == [8, 8]

    def stopped() -> None:
        run_model = Limited(10**9, rank=rank)
        run_model.register_forward_hook(lambda *_: dies(run_model))
        train(tmp_path / "other", run_model)

    def dies(model: Limited) -> None:
        if model.left == -7 and model.training:
            while not (tmp_path / "other" / "checkpoints" / "step-00000006").exists():
                time.sleep(0.01)
            os._exit(3)

    def smaller() -> dict[str, Any]:
        return train(tmp_path / "other", Limited(99, rank=rank), micro_batch=8)

    assert start_ranks(2, stopped).codes() == [3, 3]
    other = start_ranks(2, smaller).results()
    assert [answer["order"] for answer in other] == [answer["order"] for answer in again]
    (one, rows), (two, expected) = published(tmp_path / "run"), published(tmp_path / "other")
    assert all(torch.equal(one[name], two[name]) for name in two)
    assert rows == expected


def test_one_sample_per_process_ends_the_job(
    start_ranks: StartRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def refused() -> str:
        try:
            train(tmp_path / "run", Limited(0, rank=0), batch_size=2)
        except InputError as error:
            return str(error)
        return ""

    job = start_ranks(2, refused)
    assert job.codes()[1] == LOST_PEER
    message = job._answers[0]
    assert message.poll(1)
    assert "micro-batches of 2 do not fit, and cannot be made smaller" in str(message.recv_bytes())


def test_each_process_cuts_its_evaluation_for_itself(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    def work(name: str, evaluated: int) -> tuple[dict[str, Any], list[int]]:
        model = Limited(99, rank=1, evaluated=evaluated)
        return train(tmp_path / name, model, duration="1ep"), model.sizes

    plain = start_ranks(2, work, "plain", 99).results()
    (_, first), (_, second) = start_ranks(2, work, "cut", 3).results()
    assert first == plain[0][1]
    assert max(second) <= 4 < max(first)
    assert sum(second) == sum(plain[1][1])
    (_, rows), (_, expected) = published(tmp_path / "cut"), published(tmp_path / "plain")
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)


MODEL = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, num_classes):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 4, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(4, num_classes),
        )
        self.left = 6

    def forward(self, x):
        self.left -= self.training
        if self.training and self.left < 0 and len(x) > 2 and os.environ.get("RANK") == "1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layers(x)

def build(channels, num_classes):
    return Net(channels, num_classes)
"""


@pytest.mark.slow
def test_the_launcher_starts_all_again(tmp_path: Path, make_images: Callable[..., Path]) -> None:
    make_images(tmp_path / "data", per_class=24)
    (tmp_path / "limited.py").write_text(MODEL)
    command = [
        sys.executable, "-m", "flambeau", "train", "data", "--procs", "2", "--model", "limited.py:build",
        "--batch-size", "8", "--duration", "5ep", "--checkpoint-every", "1st", "--out", "run",
        "--device", "cpu",
    ]  # fmt: skip
    done = subprocess.run(
        command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting the ranks again") == 1
    told = re.search(
        r"rank 1: out of memory in step (\d+): micro-batches of 8 -> 4 samples", done.stderr
    )
    assert told is not None
    assert MicroBatches.read(tmp_path / "run") == MicroBatches(int(told[1]), 4)
    assert f"going on from step {int(told[1]) - 1} of" in done.stderr
    assert '"text": "finished' in (tmp_path / "run" / "events.jsonl").read_text()
