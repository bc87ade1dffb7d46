"""The chart of a notebook: which figures are drawn, from the first line of an earlier start on."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import pytest

from flambeau.run.loop import notebook_chart
from flambeau.run.loop.notebook_chart import NotebookChart


class Axes:
    """Takes what would be drawn."""

    def __init__(self) -> None:
        self.drawn: dict[str, tuple[list[float], list[float]]] = {}

    def plot(self, x: Any, y: Any, *, label: str, **_: Any) -> None:
        self.drawn[label] = list(x), list(y)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def curves(chart: NotebookChart) -> dict[str, tuple[list[float], list[float]]]:
    axes = Axes()
    notebook_chart._draw_curves(axes, chart._curves)  # type: ignore[arg-type]
    return axes.drawn


def test_figures_by_epoch_without_what_the_clock_says(tmp_path: Path) -> None:
    lines = [
        {"step": 5, "epoch": 0, "train_loss": 2.0, "images_per_s": 9.0, "learning_rate": 0.1},
        {"step": 10, "epoch": 0, "train_loss": None, "learning_rates": [0.1]},
        {"step": 10, "epoch": 0, "val_accuracy": 0.5},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 15, "val')
    chart = NotebookChart(steps_per_epoch=10)
    chart.load(path)
    chart.add({"step": 20, "epoch": 1, "val_accuracy": 0.75, "train_loss": math.nan})
    assert curves(chart) == {
        "train_loss": ([0.5], [2.0]), "val_accuracy": ([1.0, 2.0], [0.5, 0.75])
    }  # fmt: skip
    assert chart._png().startswith(b"\x89PNG")
    chart.load(path)  # after a rollback
    assert curves(chart)["val_accuracy"] == ([1.0], [0.5])


def test_a_long_run_is_thinned_out() -> None:
    chart = NotebookChart(steps_per_epoch=1)
    for step in range(10_000):
        chart.add({"step": step, "train_loss": 1.0})
    assert 1000 < len(curves(chart)["train_loss"][0]) <= 2000


def test_without_matplotlib_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook_chart._can_draw.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for _ in range(2):
        chart = NotebookChart(steps_per_epoch=1)
        chart.add({"step": 1, "train_loss": 1.0})
        chart.draw()
    assert capsys.readouterr().err.count('pip install "flambeau[plot]"') == 1
    notebook_chart._can_draw.cache_clear()
