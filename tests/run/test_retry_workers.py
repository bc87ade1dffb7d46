"""Workers that die or hang are started again: the same batches, to the bit, or the error after too many."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.loader import Loader, ReadOptions
from flambeau.data.loading.workers.processes import Restarts
from flambeau.errors import InputError, WorkerLost
from flambeau.run.run import Run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are watched in /proc")


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """40 rows with noise; a worker that reads row 17 is lost as often as there are files `lose-N`."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.how = folder, how
        self.rows = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        marks = sorted(self.folder.glob("lose-*")) if index == 17 else []
        if marks:
            marks[0].unlink()
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(100)
        return self.rows[index] + 0.1 * torch.randn(3), torch.tensor(int(self.rows[index, 0] > 0))


def train(folder: Path, rows: Rows, **options: Any) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    run = Run(
        folder, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), rows,
        duration="3ep", batch_size=6, accumulate=2, workers=2, bar=False, **options,
    )  # fmt: skip
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(cross_entropy(model(x), y))
    return model.state_dict(), run.state.order_crc


def lose(folder: Path, times: int) -> None:
    for number in range(times):
        (folder / f"lose-{number}").touch()


@pytest.mark.parametrize("how", ["killed", "stalled"])
def test_a_run_goes_on_to_the_same_bits(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = Rows(tmp_path, how)
    whole, order = train(tmp_path / "whole", rows)
    lose(tmp_path, 2)
    capsys.readouterr()
    again, same_order = train(tmp_path / "run", rows, retry_workers=2, stall_timeout=2.0)
    assert same_order == order
    for name, tensor in whole.items():
        assert torch.equal(tensor, again[name])
    lines = [line for line in capsys.readouterr().err.splitlines() if "data worker" in line]
    assert len(lines) == 2
    for line, left in zip(lines, (1, 0), strict=True):
        assert f"the workers are started again ({left} more times if need be)" in line
    assert ("was killed" if how == "killed" else "reading sample 17") in lines[0]
    events = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert [row["text"] for row in map(json.loads, events) if "data worker" in row["text"]] == lines


def test_after_too_many_the_run_ends(tmp_path: Path) -> None:
    rows = Rows(tmp_path, "killed")
    lose(tmp_path, 9)
    with pytest.raises(WorkerLost, match="data worker"):
        train(tmp_path / "run", rows, retry_workers=1)
    assert len(list(tmp_path.glob("lose-*"))) == 7


def test_evaluations_count_too(tmp_path: Path) -> None:
    restarts = Restarts(1, say=lambda text: None)
    rows = Rows(tmp_path, "killed")

    def loader() -> Loader:
        reading = ReadOptions(workers=1, restarts=restarts)
        return Loader(rows, BatchLayout(7), shuffle=False, reading=reading)

    expected = [micro.indices.tolist() for micro in loader().stream(epoch=0, position=0, epochs=1)]
    lose(tmp_path, 1)
    found = [micro.indices.tolist() for micro in loader().stream(epoch=0, position=0, epochs=1)]
    assert (found, restarts.left) == (expected, 0)
    lose(tmp_path, 1)
    with pytest.raises(WorkerLost):
        list(loader().stream(epoch=0, position=0, epochs=1))


def test_ranks_go_on_together(start_ranks: Callable[..., Any], tmp_path: Path) -> None:
    rows = Rows(tmp_path, "killed")
    whole = start_ranks(2, lambda: train(tmp_path / "whole", rows)).results()
    lose(tmp_path, 1)
    again = start_ranks(2, lambda: train(tmp_path / "run", rows, retry_workers=1)).results()
    for one, other in zip(whole, again, strict=True):
        assert one[1] == other[1]
        for name, tensor in one[0].items():
            assert torch.equal(tensor, other[0][name])


def test_errors_of_a_dataset_are_not_retried(tmp_path: Path) -> None:
    class Wrong(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index == 17:
                raise ValueError("no such row")
            return super().__getitem__(index)

    with pytest.raises(Exception, match="no such row") as caught:
        train(tmp_path / "run", Wrong(tmp_path, "killed"), retry_workers=5)
    assert not isinstance(caught.value, WorkerLost)


def test_options(tmp_path: Path) -> None:
    rows = Rows(tmp_path, "killed")
    with pytest.raises(InputError, match="retry_workers must be from 0 to 1000, got -1"):
        train(tmp_path / "run", rows, retry_workers=-1)
    model = nn.Linear(3, 2)
    batches = torch.utils.data.DataLoader(rows, batch_size=4)
    with pytest.raises(InputError, match="retry_workers would have no effect"):
        Run(tmp_path / "run", model, torch.optim.SGD(model.parameters()), batches, duration="1ep",
            retry_workers=2)  # fmt: skip
