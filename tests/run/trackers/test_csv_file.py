"""metrics.csv: what is in metrics.jsonl, a row per line, whole at any moment."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flambeau.run.trackers.csv_file import CsvFile
from flambeau.run.trackers.tracker import Position, TrackedRun

Points = list[tuple[int, dict[str, float]]]


def rows(folder: Path, timeless: Any) -> Points:
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        found = [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]
    return [(int(row.pop("step")), timeless(row)) for row in found]


def test_it_holds_the_lines(
    tmp_path: Path, train: Callable[..., Any], points: Callable[[Path], Points], timeless: Any
) -> None:
    train(tmp_path / "run", "csv")
    assert rows(tmp_path / "run", timeless) == points(tmp_path / "run")
    header = (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert header == (
        "step,epoch,train_loss,images_per_s,data_wait,learning_rate,learning_rates/0,learning_rates/1,"
        "val_loss,val_accuracy"
    )


def test_after_a_kill_and_a_resume_it_is_that_of_a_run_that_was_not_killed(
    tmp_path: Path,
    train: Callable[..., Any],
    killed: Callable[..., None],
    points: Callable[[Path], Points],
    timeless: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CsvFile, "flush_s", 0.0)
    train(tmp_path / "whole", None)
    is_there = (tmp_path / "run" / "metrics.csv").exists
    killed(tmp_path / "run", "csv", kill_at=7, until=is_there)
    steps = [step for step, _ in rows(tmp_path / "run", timeless)]
    assert steps == [1, 2, 3, 4, 4, 5, 6, 7][: len(steps)]  # as far as the thread had come
    train(tmp_path / "run", "csv")
    assert rows(tmp_path / "run", timeless) == points(tmp_path / "whole")


def test_a_rollback_removes_rows(
    tmp_path: Path,
    train: Callable[..., Any],
    points: Callable[[Path], Points],
    timeless: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CsvFile, "flush_s", 0.0)
    train(tmp_path / "run", "csv", bad_at=7, on_nan="rollback")
    assert rows(tmp_path / "run", timeless) == points(tmp_path / "run")


def test_columns_grow_and_rows_before_them_stay(tmp_path: Path) -> None:
    file = CsvFile(TrackedRun(tmp_path, {}, tmp_path / "metrics.jsonl", 0, print))
    assert file.start() == (0, 0)
    path = tmp_path / "metrics.csv"
    file.line(1, {"loss": 0.5})
    assert not path.exists()
    file.flush(Position(1, 1))
    assert path.read_text() == "step,loss\n1,0.5\n"
    file.line(2, {"loss": 0.25})
    file.flush(Position(2, 1))
    file.line(2, {'a "b", c': 1})
    file.flush(Position(2, 2))
    assert path.read_text() == 'step,loss,"a ""b"", c"\n1,0.5,\n2,0.25,\n2,,1\n'
    file.line(3, {"loss": 0.125})  # not flushed, and taken back
    assert file.rewind(Position(2, 1)) == (2, 0)
    assert path.read_text() == 'step,loss,"a ""b"", c"\n1,0.5,\n'
