"""Evaluations and other loops within an epoch: what they leave in the lines, the checkpoints and the best."""

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flambeau.run.run import Run


def data(length: int = 48) -> TensorDataset:
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x[:, 0] + 0.3 * x[:, 1] > 0).long())


def start(folder: Path, **settings: Any) -> Run:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    told = {
        "duration": "2ep", "batch_size": 4, "log_every": 4, "checkpoint_every": "4st", "bar": False,
        "keep": 100, "best": "val_loss",
    } | settings  # fmt: skip
    return Run(folder, model, optimizer, data(), **told)


def loss_of(run: Run, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(run.model(batch[0]), batch[1])


def evaluate(run: Run) -> Iterator[None]:
    for batch in run.evaluate(data(8)):
        run.log(val_loss=loss_of(run, batch))
        yield


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kinds(folder: Path) -> list[tuple[int, str]]:
    return [(row["step"], "train" if "train_loss" in row else "val") for row in rows(folder)]


def figures(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows(folder) if name in row]


@pytest.mark.parametrize("stop_at", [4, 12, 24])
def test_a_stop_in_an_evaluation_at_a_step_with_a_line(tmp_path: Path, stop_at: int) -> None:
    def go(folder: Path, stop_at: int | None = None) -> None:
        run = start(folder)
        for _ in run.epochs():
            for batch in run.batches():
                run.step(loss_of(run, batch))
                if run.state.step % 4 == 0:
                    for _ in evaluate(run):
                        if run.state.step == stop_at:
                            os.kill(os.getpid(), signal.SIGTERM)

    go(tmp_path / "whole")
    steps = range(4, 25, 4)
    assert kinds(tmp_path / "whole") == list(itertools.product(steps, ("train", "val")))
    with pytest.raises(SystemExit):
        go(tmp_path / "stopped", stop_at)
    go(tmp_path / "stopped")
    assert figures(tmp_path / "stopped", "train_loss") == figures(tmp_path / "whole", "train_loss")


@pytest.mark.parametrize("at", [4, 6])
def test_the_time_of_an_evaluation_is_not_that_of_training(tmp_path: Path, at: int) -> None:
    """At a step with a line, and elsewhere; the limits are far apart, so no slow machine matters."""
    run, taken = start(tmp_path / "run", duration="8st"), 0.0
    for _ in run.epochs():
        began = time.perf_counter()
        for batch in run.batches():
            time.sleep(0.01)
            run.step(loss_of(run, batch))
            if run.state.step == at:
                taken -= time.perf_counter()
                for _ in evaluate(run):
                    time.sleep(1.0)
                taken += time.perf_counter()
        taken = time.perf_counter() - began - taken
    for row in rows(tmp_path / "run"):
        if "train_loss" in row:
            assert 16 / (taken + 0.5) < row["images_per_s"] < 16 / 0.04


@pytest.mark.parametrize("by", ["islice", "break"])
def test_an_epoch_in_several_loops(tmp_path: Path, by: str) -> None:
    run = start(tmp_path / "run")
    for _ in run.epochs():
        while run.state.position < run.state.data_length:
            if by == "islice":
                for batch in itertools.islice(run.batches(), 4):
                    run.step(loss_of(run, batch))
            else:
                for batch in run.batches():
                    run.step(loss_of(run, batch))
                    if run.state.step % 4 == 0:
                        break
            for _ in run.evaluate(data(8)):
                run.log(val_loss=abs(run.state.step - 8.0))
    steps = list(range(4, 25, 4))
    assert kinds(tmp_path / "run") == list(itertools.product(steps, ("train", "val")))
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == [f"step-{step:08d}" for step in [0, *steps]]
    assert run.result is not None
    assert (run.result.weights, run.result.step) == ("best", 8)


def test_a_rollback_at_the_end_of_an_epoch_that_was_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = start(tmp_path / "run", on_nan="rollback")
    for _ in run.epochs():
        for batch in run.batches():
            is_bad = run.state.step == 6 and not run.state.rollbacks
            run.step(loss_of(run, batch) * (float("nan") if is_bad else 1.0))
            if run.state.step == 8:
                run.stop()
                break
    assert (run.state.step, run.state.rollbacks) == (8, 1)
    assert run.result is not None
    assert "going on from step 4" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["killed", "asked to stop"])
def test_an_evaluation_between_the_micro_batches_of_a_step(
    tmp_path: Path, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Gradients of half a step are in no checkpoint, so none is made there."""

    class Kill(Exception):
        pass

    def go(folder: Path, end_in: int | None = None) -> dict[str, Tensor]:
        run, evaluations = start(folder, accumulate=2, batch_size=2, checkpoint_every="1ep"), 0
        for _ in run.epochs():
            for number, batch in enumerate(run.batches()):
                run.step(loss_of(run, batch))
                if number % 7 == 6:
                    for _ in evaluate(run):
                        if evaluations == end_in and how == "asked to stop":
                            os.kill(os.getpid(), signal.SIGTERM)
                    if evaluations == end_in and how == "killed":
                        raise Kill
                    evaluations += 1
        return dict(run.model.state_dict())

    whole = go(tmp_path / "whole")
    told = "between the micro-batches of a step chooses no best weights"
    assert capfd.readouterr().err.count(told) == 1
    with pytest.raises((SystemExit, Kill)):
        go(tmp_path / "ended", end_in=2)
    again = go(tmp_path / "ended")
    for name, tensor in whole.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)
    for name in (
        "train_loss",
        "val_loss",
    ):  # the evaluation in which the stop is asked for is whole
        assert figures(tmp_path / "ended", name) == figures(tmp_path / "whole", name)


class Slow:
    """A metric that takes long to put together."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, values: Tensor) -> None:
        self.count += len(values)

    def compute(self) -> float:
        time.sleep(1.0)
        return float(self.count)

    def reset(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_what_a_metric_takes_is_not_time_of_training(tmp_path: Path) -> None:
    run = start(
        tmp_path / "run", duration="8st", metrics={"seen": Slow()}, best="seen", best_mode="max"
    )
    for _ in run.epochs():
        for batch in run.batches():
            run.step(loss_of(run, batch))
            if run.state.step == 4:
                for _, y in run.evaluate(data(8)):
                    run.log(seen=y)
    assert figures(tmp_path / "run", "seen") == [(4, 8.0)]
    assert all(rate > 2 * 16 / 1.0 for _, rate in figures(tmp_path / "run", "images_per_s"))


def test_a_lost_loss_scale_is_no_matter_of_an_evaluation(tmp_path: Path) -> None:
    """The run goes back between two bodies, not within one."""
    run = start(
        tmp_path / "run",
        duration="1ep",
        precision="fp16",
        on_nan="rollback",
        checkpoint_every="3st",
    )
    within = []
    for _ in run.epochs():
        for batch in run.batches():
            if run.state.step == 7 and not run.state.rollbacks:
                run.state.amp.load_state_dict(
                    {"scale": torch.tensor(2.0**-21), "growth_tracker": torch.tensor(0)}
                )
            run.step(F.cross_entropy(run.model(batch[0]).float(), batch[1]))
            step = run.state.step
            if step % 4 == 0:
                for _ in evaluate(run):
                    pass
            within.append((step, run.state.step))
    assert run.state.rollbacks == 1
    assert all(before == after for before, after in within)
    assert [step for step, _ in figures(tmp_path / "run", "val_loss")] == [4, 8, 12]


def test_memory_that_runs_out_before_an_evaluation(tmp_path: Path) -> None:
    """The body goes on to its evaluation, which must not take the batch for one of its own."""
    run, is_short = start(tmp_path / "run", duration="4st"), True
    for _ in run.epochs():
        for batch in run.batches():
            with run.halving():
                if len(batch[0]) > 2:
                    raise torch.OutOfMemoryError("made up")
                run.step(loss_of(run, batch))
            if run.state.step % 4 == 0:
                for _ in run.evaluate(data(8)):
                    assert not is_short
                    run.log(val_loss=0.5)
            is_short = False
    assert run.state.step == 4
    assert figures(tmp_path / "run", "val_loss") == [(0, 0.5), (4, 0.5)]


def test_a_line_of_the_body_after_an_evaluation_counts_samples_of_its_batch(tmp_path: Path) -> None:
    run = start(tmp_path / "run", duration="4st")
    for _ in run.epochs():
        for batch in run.batches():
            for _ in run.evaluate(data(6)):
                run.log(val_loss=0.5)
            run.step(loss_of(run, batch))
            run.log(
                seen=batch[1].float() * 0 + 1
            )  # one for each of 4 samples, where the other had 2
    assert figures(tmp_path / "run", "seen") == [(4, 1.0)]
