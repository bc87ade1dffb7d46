"""A run folder that is removed, renamed or replaced while the run trains in it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from flambeau import InputError, Run

DATA = TensorDataset(torch.linspace(-1, 1, 32).unsqueeze(1))


def train(folder: Path, act: Callable[[], Any] = lambda: None, **settings: Any) -> Run:
    """A run of 8 steps; something is done to its folder after the third."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(folder, model, optimizer, DATA, duration="2ep", batch_size=8, bar=False, **settings)
    for _ in run.epochs():
        for (x,) in run.batches():
            run.step(mse_loss(model(x), x**2))
            if run.state.step == 3:
                act()
    return run


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def rename(folder: Path) -> None:
    folder.rename(folder.with_name("renamed"))


def replace(folder: Path) -> None:
    rename(folder)
    folder.mkdir()


@pytest.mark.parametrize("act", [remove, rename, replace])
@pytest.mark.parametrize("due", [{"log_every": 3}, {"checkpoint_every": "3st"}, {}])
def test_the_next_write_sees_it(
    tmp_path: Path, act: Callable[[Path], None], due: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    settings = {"track": "csv", "checkpoint_every": "9st", "log_every": 9, **due}
    with pytest.raises(InputError, match="removed or renamed while the run trained in it"):
        train(folder, lambda: act(folder), **settings)
    assert folder.exists() == (act is replace)
    assert not folder.exists() or not list(folder.iterdir())
    if act is not remove:
        assert train(tmp_path / "renamed", **settings).state.step == 8


def test_a_link_to_it_may_change_where_it_leads_to_the_same(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there")

    def by_another_way() -> None:
        link.unlink()
        link.symlink_to("there")

    assert train(link, by_another_way).state.step == 8


def test_a_script_that_changes_its_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written elsewhere, and the run goes on by the path that the message names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(InputError, match=f"is whole in {tmp_path}/run\nGive Run that path"):
        train(Path("run"), lambda: monkeypatch.chdir(tmp_path / "elsewhere"))
    assert not list((tmp_path / "elsewhere").iterdir())
    assert train(tmp_path / "run").result is not None
