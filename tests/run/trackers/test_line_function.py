"""Functions as trackers: each line once, in order, over kills and rollbacks; none stops or delays a run."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flambeau.run.trackers import run_trackers

Points = list[tuple[int, dict[str, float]]]


def test_it_gets_each_line_once_and_in_order(
    tmp_path: Path, train: Callable[..., Any], points: Callable[[Path], Points], timeless: Any
) -> None:
    told: Points = []
    train(tmp_path / "run", lambda step, figures: told.append((step, figures)))
    assert [(step, timeless(figures)) for step, figures in told] == points(tmp_path / "run")
    assert [step for step, _ in told] == sorted([*range(1, 17), 4, 8, 12, 16])
    assert set(told[0][1]) == {
        "epoch", "train_loss", "images_per_s", "data_wait", "learning_rate", "learning_rates/0",
        "learning_rates/1",
    }  # fmt: skip


def test_a_resume_after_a_kill_tells_no_line_twice(
    tmp_path: Path,
    train: Callable[..., Any],
    killed: Callable[..., None],
    points: Callable[[Path], Points],
    timeless: Any,
) -> None:
    def write(step: int, figures: dict[str, float]) -> None:
        with (tmp_path / "told").open("a") as file:
            file.write(json.dumps([step, timeless(figures)]) + "\n")

    train(tmp_path / "whole", None)
    log = tmp_path / "told"

    def is_on() -> bool:
        return log.exists() and len(log.read_text().splitlines()) >= 7

    killed(tmp_path / "run", write, kill_at=7, until=is_on)  # the last checkpoint is that of step 4
    assert len(log.read_text().splitlines()) in (7, 8)
    train(tmp_path / "run", write)
    told = [tuple(json.loads(line)) for line in (tmp_path / "told").read_text().splitlines()]
    # The line whose call was over, and not yet noted, may be there twice.
    told = [
        point for point, before in zip(told, [None, *told[:-1]], strict=True) if point != before
    ]
    assert told == points(tmp_path / "whole") == points(tmp_path / "run")


def test_after_a_rollback_it_gets_the_steps_once_more(
    tmp_path: Path, train: Callable[..., Any], points: Callable[[Path], Points], timeless: Any
) -> None:
    told: Points = []
    run = train(
        tmp_path / "run",
        lambda step, figures: told.append((step, timeless(figures))),
        bad_at=7,
        on_nan="rollback",
    )
    assert run.state.rollbacks == 1
    lines = points(tmp_path / "run")
    assert ("rollback" in lines[5][1]) and told[-len(lines) + 5 :] == lines[5:]
    before = told[: -len(lines) + 5]
    assert [step for step, _ in before] in (
        [1, 2, 3, 4, 4],
        [1, 2, 3, 4, 4, 5],
        [1, 2, 3, 4, 4, 5, 6],
    )


def test_one_that_raises_is_told_once_and_the_others_go_on(
    tmp_path: Path, train: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    told = []

    def fails(step: int, figures: dict[str, float]) -> None:
        if step == 3:
            raise ConnectionError("no\nserver")

    def exits(step: int, figures: dict[str, float]) -> None:
        raise SystemExit(3)

    run = train(tmp_path / "run", [fails, exits, lambda step, figures: told.append(step)])
    assert run.result is not None and len(told) == 20
    err = capsys.readouterr().err
    assert err.count("gets no more lines, and the run goes on") == 2
    assert (
        err.count("fails gets no more lines, and the run goes on: ConnectionError: no server") == 1
    )
    assert err.count("exits gets no more lines, and the run goes on: SystemExit: 3") == 1


def test_one_that_hangs_delays_nothing(
    tmp_path: Path,
    train: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_trackers, "END_WAIT_S", 0.5)
    monkeypatch.setattr(run_trackers, "_FORK_WAIT_S", 0.1)
    hangs, told, late = threading.Event(), [], []

    def blocks(step: int, figures: dict[str, float]) -> None:
        late.append(step)
        hangs.wait(60)

    try:
        run = train(tmp_path / "run", [blocks, lambda step, figures: told.append(step)], workers=1)
    finally:
        hangs.set()
    assert run.result is not None and len(told) == 20
    assert late == [1]  # and nothing after the run has left
    assert "blocks had not taken all lines 0 s after the last one: the rest is left" in (
        capsys.readouterr().err
    )
