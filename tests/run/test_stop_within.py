"""`stop_within`: after a signal a checkpoint is written only if those before took less time than is left."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau.errors import InputError
from flambeau.parallel.preemption import EXIT_CODE
from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders
from flambeau.run.folder.checkpointer import Checkpointer, Snapshot
from flambeau.run.run import Run


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each checkpoint takes a fifth of a second."""
    write = Checkpointer._save

    def slowly(self: Checkpointer, *arguments: Any) -> None:
        time.sleep(0.2)
        write(self, *arguments)

    monkeypatch.setattr(Checkpointer, "_save", slowly)


def train(
    folder: Path, *, signal_at: int = -1, duration: str = "2ep", **options: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    run = Run(
        folder, model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(x, (x[:, 0] > 0).long()),
        duration=duration, batch_size=4, checkpoint_every="3st", bar=False, **options,
    )  # fmt: skip
    for _ in run.epochs():
        for rows, targets in run.batches():
            if run.state.step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            run.step(cross_entropy(model(rows), targets))
    return model.state_dict()


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint_folders(folder / "checkpoints")]


def test_without_time_the_newest_one_stays(
    slow_disk: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole")
    with pytest.raises(SystemExit) as left:
        train(tmp_path / "run", signal_at=4, stop_within="0.1s")
    assert left.value.code == EXIT_CODE
    assert names(tmp_path / "run")[-1] == "step-00000003"
    said = capsys.readouterr().err
    assert "no checkpoint of step 5: it would take about " in said
    assert "stop_within = '0.1s' are left; the same command goes on from step-00000003" in said
    assert "saved at step" not in said
    resumed = train(tmp_path / "run")
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name])


@pytest.mark.parametrize("within", [None, "60s"])
def test_with_time_it_is_written(slow_disk: None, tmp_path: Path, within: str | None) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path / "run", signal_at=4, stop_within=within)
    assert names(tmp_path / "run")[-1] == "step-00000005"


def test_one_of_this_step_is_waited_for(slow_disk: None, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path / "run", signal_at=2, stop_within="0.05s")
    assert names(tmp_path / "run")[-1] == "step-00000003"


def test_ranks_agree(start_ranks: Callable[..., Any], slow_disk: None, tmp_path: Path) -> None:
    """One of them gets the signal; at which step all stop depends on when they have agreed."""

    def work() -> int:
        signal_at = 4 if os.environ["RANK"] == "1" else -1
        try:
            train(tmp_path / "run", signal_at=signal_at, stop_within="0.1s", duration="50ep")
        except SystemExit as left:
            return int(str(left.code))
        return 0

    assert start_ranks(2, work).results() == [EXIT_CODE, EXIT_CODE]
    steps = [int(name.removeprefix("step-")) for name in names(tmp_path / "run")]
    assert steps
    assert all(step % 3 == 0 for step in steps)  # none but those that are written in any case


def test_a_checkpoint_under_way_is_named_as_such(tmp_path: Path) -> None:
    """The line is read after a kill, too, which may have come before its end."""
    go_on = threading.Event()
    saver = Checkpointer(tmp_path, keep=2)
    snapshot = Snapshot(model={}, ema=None, state={}, meta={})
    assert saver.resume_point() == "the beginning"
    saver.save("step-00000001", snapshot, best=None, before=lambda: None)
    saver.wait()
    assert saver.resume_point() == "step-00000001"
    saver.save("step-00000002", snapshot, best=None, before=lambda: assert_set(go_on))
    assert saver.resume_point() == "step-00000002, if that is written in time, else step-00000001"
    go_on.set()
    saver.wait()
    assert saver.resume_point() == "step-00000002"


def assert_set(event: threading.Event) -> None:
    assert event.wait(timeout=300)


@pytest.mark.parametrize("within", ["30", "0s", "0min", "5d", "-1s", ""])
def test_what_is_no_time(tmp_path: Path, within: str) -> None:
    with pytest.raises(InputError, match=r"stop_within (must be a time such as '30s'|is empty)"):
        train(tmp_path / "run", stop_within=within)
