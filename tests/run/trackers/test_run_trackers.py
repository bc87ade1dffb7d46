"""Trackers of a run and of the command: what is said, when they begin and end, and that none is needed."""

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.errors import InputError
from flambeau.parallel.ranks import join_ranks
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.trackers import csv_file, run_trackers
from flambeau.trainer.api import train as train_classifier

SHORT = "--duration 4st --batch-size 4 --precision fp32 --model tiny_convnet --log-every 1"


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("tracker ")]


def test_without_trackers_there_is_no_thread_and_no_import(
    tmp_path: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("flambeau.run.trackers")]:
        monkeypatch.delitem(sys.modules, name)
    run = train(tmp_path / "run", None)
    assert run.result is not None and threads() == []
    assert not [name for name in sys.modules if name.startswith("flambeau.run.trackers")]


def test_they_end_with_the_run(tmp_path: Path, train: Callable[..., Any]) -> None:
    seen = []

    def stops(step: int, figures: dict[str, float]) -> None:
        seen.append(threads())

    train(tmp_path / "run", ["csv", stops])
    assert any("stops" in names[-1] for names in seen) and threads() == []
    before = (tmp_path / "run" / "metrics.csv").read_bytes()
    train(tmp_path / "run", ["csv", stops])  # it is finished: nothing more is told
    assert len(seen) == 20 and (tmp_path / "run" / "metrics.csv").read_bytes() == before


@pytest.mark.parametrize("track", ["csv", "tensorboard"])
def test_a_finished_run_completes_what_a_kill_has_left_out(
    tmp_path: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, track: str
) -> None:
    def files(run: str) -> list[Path]:
        return [*(tmp_path / run).glob("metrics.csv"), *(tmp_path / run).glob("tensorboard/*")]

    taken = list[int]()

    def counted(step: int, figures: dict[str, float]) -> None:
        taken.append(step)

    with monkeypatch.context() as killed:
        killed.setattr(run_trackers.RunTrackers, "close", lambda self, result: self.abandon())
        killed.setattr(run_trackers.RunTrackers, "grow", lambda self, size: None)
        assert train(tmp_path / "run", [track, counted]).result is not None
    assert taken == []
    assert train(tmp_path / "run", [track, counted]).result is not None
    assert len(taken) == 20
    assert sum(file.stat().st_size for file in files("run")) > 300
    before = {file: file.read_bytes() for file in files("run")}
    train(tmp_path / "run", [track, counted])  # all have taken everything
    assert len(taken) == 20 and {file: file.read_bytes() for file in files("run")} == before


def test_a_missing_package_is_told_with_what_installs_it(
    tmp_path: Path,
    train: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    run = train(tmp_path / "run", "tensorboard:histograms,wandb,mlflow,csv")
    assert run.result is not None
    err = capsys.readouterr().err
    for name in ("tensorboard", "wandb", "mlflow"):
        assert err.count(f"Install it: pip install 'flambeau[{name}]'") == 1
    assert "tensorboard:histograms gets no lines, and the run goes on: " in err
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 21


def test_a_tracker_that_cannot_be_made_or_cannot_write(
    tmp_path: Path,
    train: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir()
    # As root no folder is read-only; a folder in the place of the file cannot be written either.
    monkeypatch.setattr(csv_file.CsvFile, "start", lambda self: (self._path.mkdir(), (0, 0))[1])
    run = train(tmp_path / "run", "csv,tensorboard")
    assert run.result is not None
    err = capsys.readouterr().err
    assert err.count("csv gets no more lines, and the run goes on: IsADirectoryError: ") == 1

    def broken(self: Any, facts: Any) -> None:
        raise AttributeError("module 'numpy' has no attribute 'bool8'")

    monkeypatch.setattr(csv_file.CsvFile, "__init__", broken)
    run = train(tmp_path / "other", "csv")
    assert run.result is not None
    assert (
        capsys.readouterr().err.count("csv gets no lines, and the run goes on: AttributeErr") == 1
    )


def test_an_unknown_one_is_refused_before_anything_is_made(
    tmp_path: Path, train: Callable[..., Any]
) -> None:
    with pytest.raises(InputError, match="got 'tensorbaord'; did you mean 'tensorboard'"):
        train(tmp_path / "run", "tensorbaord")
    with pytest.raises(InputError, match=r"^track must be names of trackers, or functions"):
        train(tmp_path / "run", 3)
    assert not (tmp_path / "run").exists()


def test_the_command_takes_them_and_a_resume_may_change_them(
    tmp_path: Path, flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = flambeau("train", images, SHORT, "--track csf")
    assert code == 2 and "flambeau: track must be none, or of tensorboard," in err
    assert "got 'csf'; did you mean 'csv'" in err and not Path("runs").exists()

    code, _, err = flambeau("train", images, SHORT, "--out run --track csv --extend 0ep")
    assert code == 2  # of a run that is none yet
    assert flambeau("train", images, SHORT, "--out run --track csv").code == 0
    lines = len(Path("run/metrics.csv").read_text().splitlines())
    assert lines == len(Path("run/metrics.jsonl").read_text().splitlines()) + 1
    # What is not said again is as it was.
    assert flambeau("train", images, SHORT, "--out run --extend 2st").code == 0
    longer = len(Path("run/metrics.csv").read_text().splitlines())
    assert longer == len(Path("run/metrics.jsonl").read_text().splitlines()) + 1 > lines
    again = flambeau("train", images, SHORT, "--out run --extend 4st --track none")
    assert again.code == 0
    assert len(Path("run/metrics.csv").read_text().splitlines()) == longer
    assert 'track = "none"' in Path("run/config.toml").read_text()


def test_a_dry_run_tracks_nothing(
    tmp_path: Path, flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(csv_file.CsvFile, "__init__", None)
    code, _, err = flambeau("train", images, SHORT, "--dry-run --track csv")
    assert code == 0 and "gets no" not in err


def test_train_takes_names_and_functions(tmp_path: Path, images: Path) -> None:
    told = []

    def stops(step: int, figures: dict[str, float]) -> None:
        told.append(step)

    tiny: dict[str, Any] = {
        "batch_size": 4, "model": "tiny_convnet", "log_every": 1, "precision": "fp32", "bar": False,
    }  # fmt: skip
    train_classifier(images, out=tmp_path / "run", duration="4st", track=["csv", stops], **tiny)
    assert sorted({*told}) == [1, 2, 3, 4]
    assert (tmp_path / "run" / "metrics.csv").exists()
    assert 'track = "csv"' in (tmp_path / "run" / "config.toml").read_text()
    with pytest.raises(InputError, match=r"^track must be none, or of"):
        train_classifier(images, out=tmp_path / "run", track="wandbb")


def test_workers_are_forked_beside_trackers(tmp_path: Path, train: Callable[..., Any]) -> None:
    told = []
    run = train(tmp_path / "run", ["csv", lambda step, figures: told.append(step)], workers=2)
    plain = train(tmp_path / "plain", None)
    assert run.result is not None and len(told) == 20
    for ours, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_sharded_model_has_no_histograms(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config.touch()
    folder.metrics.touch()
    said: list[str] = []
    track = "tensorboard:histograms"
    all_of_it = run_trackers.RunTrackers(track, folder, size=0, is_sharded=True, say=said.append)
    all_of_it.evaluated(torch.nn.Linear(2, 2), 3)
    all_of_it.close(None)
    assert said == ["no histograms: the model is sharded, and each process has a piece of a weight"]


def test_of_several_processes_the_first_tells(
    tmp_path: Path, train: Callable[..., Any], start_ranks: Any
) -> None:
    def work() -> list[int]:
        told: list[int] = []
        join_ranks()
        train(tmp_path / "run", lambda step, figures: told.append(step))
        return told

    first, second = start_ranks(2, work, group=True).results()
    assert len(first) == 20 and second == []
