"""The checkpoint before the first step is written while that step is computed."""

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flambeau.run.folder import checkpointer
from flambeau.run.folder.checkpointer import SaveFailed
from flambeau.run.run import Run


def new_run(folder: Path) -> Run:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 4), torch.zeros(8, dtype=torch.long))
    return Run(folder, model, optimizer, data, duration="2ep", batch_size=2, bar=False)


def steps_of(run: Run, *, is_computing: threading.Event) -> int:
    """Train to the end or an error; returns the steps that were begun."""
    steps = 0
    with pytest.raises(SaveFailed, match=r"step-00000000 could not be written: .*none"):
        for _ in run.epochs():
            for x, y in run.batches():
                steps += 1
                is_computing.set()
                run.step(nn.functional.cross_entropy(run.model(x), y))
    return steps


def test_the_first_step_does_not_wait_and_the_second_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    is_computing = threading.Event()
    was_computing = list[bool]()

    def refuse(*_: Any, **__: Any) -> None:
        was_computing.append(is_computing.wait(timeout=60))
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(checkpointer, "save_checkpoint", refuse)
    assert steps_of(new_run(tmp_path / "run"), is_computing=is_computing) == 1
    assert was_computing == [True]
    assert "left run.epochs()" not in capfd.readouterr().err  # the error says it all
