"""Runs and threads: one thread trains at a time, the one that has made the run; signals stay as they were."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from flambeau.data.wrap import wrap
from flambeau.errors import InputError
from flambeau.run.run import Run
from flambeau.trainer.api import train as train_images


def make(folder: Path) -> Run:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(8, 2))
    return Run(folder, model, optimizer, data, duration="2st", batch_size=4, bar=False)


def train(run: Run, in_step: Callable[[], object] = lambda: None) -> None:
    for _ in run.epochs():
        for (x,) in run.batches():
            run.step(run.model(x).square().mean())
            in_step()


def in_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        return pool.submit(work).result()


def test_a_second_thread_that_would_train_is_refused(tmp_path: Path) -> None:
    told = []

    def start_others() -> None:
        for start in (
            lambda: make(tmp_path / "second"),
            lambda: train_images("fashion-mnist-mini", out=tmp_path / "third"),
        ):
            with pytest.raises(InputError) as refused:
                in_thread(start)
            told.append(str(refused.value))

    train(make(tmp_path / "first"), start_others)
    assert len(told) == 4
    assert all("thread 'MainThread' of this process is training, and this is" in t for t in told)
    assert {path.name for path in tmp_path.iterdir()} == {"first"}
    in_thread(lambda: train(make(tmp_path / "second")))
    assert (tmp_path / "second" / "result.json").exists()


def test_two_runs_that_are_ready_do_not_both_start(tmp_path: Path) -> None:
    made = threading.Barrier(2)
    started = threading.Barrier(2)

    def work(name: str) -> str:
        run = make(tmp_path / name)
        made.wait(60)
        try:
            train(run, lambda: started.wait(60) if run.state.step == 1 else None)
        except InputError as error:
            started.wait(60)
            return str(error)
        return "finished"

    with ThreadPoolExecutor(2) as pool:
        ends = sorted(pool.map(work, ("a", "b")))
    assert ends[0] == "finished"
    assert "of this process is training" in ends[1]


def test_a_run_is_used_where_it_was_made(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    run = make(tmp_path / "run")
    for use in (lambda: train(run), lambda: list(run.batches()), lambda: list(run.evaluate([1]))):
        with pytest.raises(InputError, match=r"made in thread 'MainThread' and is used in .*other"):
            in_thread(use)
    train(run)
    assert run.result is not None
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_signals_survive_a_run_that_another_thread_closes(tmp_path: Path) -> None:
    got = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        run = make(tmp_path / "run")
        in_thread(run.close)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_run_in_a_thread_says_that_no_signals_arrive(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    in_thread(lambda: train(make(tmp_path / "run")))
    assert "SIGTERM ends it without a checkpoint" in capfd.readouterr().err
    train(make(tmp_path / "main"))
    assert "SIGTERM" not in capfd.readouterr().err


class Drawing(Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.rand(()) for _ in range(50)])


def test_wrapped_data_are_read_in_two_threads_as_in_one() -> None:
    def read(seed: int) -> list[Tensor]:
        return list(wrap(Drawing(), batch_size=4, seed=seed))

    alone = [read(seed) for seed in (0, 1)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(read, (0, 1)))
    finally:
        sys.setswitchinterval(interval)
    torch.testing.assert_close(together, alone, rtol=0, atol=0)
