"""Ranks stop together when one is asked to, and end when one is lost or makes no progress."""

import dataclasses
import json
import os
import re
import signal
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
from torch.utils.data import Dataset

from flambeau.parallel import ranks
from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders, verify_checkpoint
from flambeau.run.run import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it watches processes in /proc")
StartRanks = Callable[..., Any]


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """48 rows, which cannot be read any more once there is a file `stuck`."""

    def __init__(self, stuck: Path | None = None) -> None:
        self.stuck = stuck
        self.rows = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        while self.stuck is not None and self.stuck.exists():
            time.sleep(1)
        return self.rows[index], torch.tensor(index % 2)


def train(
    folder: Path,
    *,
    pause_s: float = 0.0,
    pause_in_evaluation_s: float = 0.0,
    stuck: Path | None = None,
    **settings: Any,
) -> None:
    """A run of 60 steps; it writes the number of each step that it has done to steps-RANK."""
    torch.manual_seed(0)
    rank = os.environ.get("RANK", "0")
    data = Rows(stuck)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    run = Run(
        folder, model, optimizer, data, duration="15ep", batch_size=12, checkpoint_every="5ep",
        log_every=7, **settings,
    )  # fmt: skip
    with (folder / f"steps-{rank}").open("a", buffering=1) as steps:
        for epoch in run.epochs():
            for rows, targets in run.batches():
                time.sleep(pause_s * (1 + int(rank)))  # each at a pace of its own
                run.step(cross_entropy(model(rows), targets))
                steps.write(f"{run.state.step}\n")
            for rows, targets in run.evaluate(Rows()):
                steps.write(f"evaluating {epoch}\n")
                time.sleep(pause_in_evaluation_s * (1 + int(rank)))
                run.log(val_accuracy=model(rows).argmax(1) == targets)


def wait_for(steps: Path, text: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not (steps.exists() and text in steps.read_text().split("\n")):
        assert time.monotonic() < deadline, f"{text!r} is not in {steps}"
        time.sleep(0.005)


def newest(folder: Path) -> int:
    path = checkpoint_folders(folder / "checkpoints")[-1]
    verify_checkpoint(path)
    return int(path.name.removeprefix("step-"))


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_a_signal_on_any_rank_stops_all_after_the_same_step(
    start_ranks: StartRanks, tmp_path: Path, asked: int
) -> None:
    folder = tmp_path / "run"
    job = start_ranks(3, lambda: train(folder, pause_s=0.01))
    wait_for(folder / f"steps-{asked}", "9")
    job.kill(asked, signal.SIGTERM)
    assert job.codes() == [75, 75, 75]
    last = {(folder / f"steps-{rank}").read_text().split("\n")[-2] for rank in range(3)}
    # The step that stops does not return: all have written the one before, or were evaluating.
    step = newest(folder)
    assert last <= {f"{step - 1}", f"{step}", f"evaluating {step // 4 - 1}"}
    assert len(last) == 1 or step % 4 == 0
    assert step < 60

    assert start_ranks(3, train, folder).codes() == [0, 0, 0]
    unstopped = tmp_path / "unstopped"
    assert start_ranks(3, train, unstopped).codes() == [0, 0, 0]
    for name, weight in load_file(unstopped / "model.safetensors").items():
        assert torch.equal(weight, load_file(folder / "model.safetensors")[name]), name


def test_a_signal_in_an_evaluation_does_not_wait_for_its_end(
    start_ranks: StartRanks, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    job = start_ranks(2, lambda: train(folder, pause_in_evaluation_s=0.4))
    wait_for(folder / "steps-1", "evaluating 0")
    job.kill(1, signal.SIGUSR1)
    assert job.codes() == [75, 75]
    assert newest(folder) == 4
    assert "evaluating 1" not in (folder / "steps-0").read_text()
    assert start_ranks(2, train, folder).codes() == [0, 0]


def test_a_killed_rank_ends_the_others(
    start_ranks: StartRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    job = start_ranks(3, lambda: train(folder, pause_s=0.01))
    wait_for(folder / "steps-1", "6")
    job.kill(1, signal.SIGKILL)
    assert job.codes(30) == [76, -signal.SIGKILL, 76]
    (line,) = [x for x in capfd.readouterr().err.splitlines() if x.startswith("flambeau: rank")]
    assert re.match(r"flambeau: rank 1 of 3 \(host .*, process \d+\) ", line)
    *_, event = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    assert event["text"] == line.replace("flambeau:", "lost:")
    assert 5 <= event["step"] < 60


@pytest.mark.parametrize("how", ["stopped", "stopped, and one is slow", "asleep"])
def test_a_rank_that_stands_still_is_named_with_its_stack(
    start_ranks: StartRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str
) -> None:
    folder = tmp_path / "run"

    def work() -> None:
        if how == "asleep" and os.environ["RANK"] == "2":
            original = cross_entropy

            def falls_asleep(*arguments: Any) -> Tensor:
                if (folder / "asleep").exists():
                    time.sleep(600)
                return original(*arguments)

            globals()["cross_entropy"] = falls_asleep
        if how == "stopped, and one is slow" and os.environ["RANK"] == "1":
            ranks.PACE = dataclasses.replace(ranks.PACE, poll_s=1.5)  # type: ignore[misc]
        train(folder, pause_s=0.01, stall_timeout=3.0)

    job = start_ranks(3, work)
    wait_for(folder / "steps-2", "6")
    if how.startswith("stopped"):
        job.kill(2, signal.SIGSTOP)
    else:
        (folder / "asleep").touch()
    codes = job.codes()
    assert codes[:2] == [76, 76]
    assert codes[2] in (1, -signal.SIGKILL)
    said = capfd.readouterr().err
    (line,) = [x for x in said.splitlines() if x.startswith("flambeau: rank")]
    assert re.match(
        r"flambeau: rank 2 of 3 \(host .*, process \d+\) has (been silent|made no progress) for",
        line,
    )
    assert "in train" in said  # its stack
    if how == "asleep":
        assert "in falls_asleep" in said


def test_a_data_worker_that_hangs_is_named_before_its_rank(
    start_ranks: StartRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def work() -> None:
        stuck = folder / "stuck" if os.environ["RANK"] == "1" else None
        train(folder, pause_s=0.01, stall_timeout=1.5, workers=1, stuck=stuck)

    job = start_ranks(2, work)
    wait_for(folder / "steps-1", "6")
    (folder / "stuck").touch()
    assert job.codes() == [76, 1]
    said = capfd.readouterr().err
    (line,) = [x for x in said.splitlines() if x.startswith("flambeau: rank")]
    assert re.match(
        r"flambeau: rank 1 of 2 .* failed.*data worker 0 .* has been reading sample \d+ for", line
    )


def test_an_error_on_one_rank_ends_all_and_is_told_once(
    start_ranks: StartRanks, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"

    def work() -> None:
        if os.environ["RANK"] == "1":
            globals()["cross_entropy"] = lambda *_: list[Tensor]()[1]
        train(folder)

    job = start_ranks(3, work)
    assert sorted(job.codes()) == [1, 76, 76]
    said = capfd.readouterr().err
    assert (
        said.count("IndexError: list index out of range") <= 2
    )  # the traceback, and the last line
    assert "gloo" not in said
