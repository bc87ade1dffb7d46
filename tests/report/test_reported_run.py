"""What a report reads and draws: lines of metrics.jsonl, thinned, by run and by seed."""

import json
import math
import random
from typing import Any

from flambeau.report.reported_run import (
    MOST_POINTS,
    ReportedRun,
    Series,
    charts,
    read_series,
    seed_groups,
    thinned,
)


def lines(*rows: Any) -> list[bytes]:
    return [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]


def test_numbers_by_name_and_step() -> None:
    found = read_series(
        lines(
            {"step": 5, "epoch": 0, "train_loss": 2, "learning_rates": [0.1, 0.2]},
            {"step": 10, "epoch": 0, "train_loss": None, "learning_rates": [0.3, 0.4]},
            {"step": 10, "epoch": 0, "val_loss": 1.5, "note": "text", "is_best": True},
        ),
        steps_per_epoch=10,
    )
    assert found == {
        "train_loss": Series((5, 10), (0.5, 1.0), (2.0, None)),
        "learning_rates 0": Series((5, 10), (0.5, 1.0), (0.1, 0.3)),
        "learning_rates 1": Series((5, 10), (0.5, 1.0), (0.2, 0.4)),
        "val_loss": Series((10,), (1.0,), (1.5,)),
    }


def test_lines_that_are_none_of_it_are_passed_over() -> None:
    found = read_series(
        lines(
            b'{"step": 1, "loss": 1.0', b"[1, 2]", b"[" * 100_000, b"\xff\xfe", {"loss": 1},
            {"step": -1, "loss": 1}, {"step": True, "loss": 1}, {"step": 2**60, "loss": 1},
            b'{"step": 3, "loss": NaN, "other": 1e999, "huge": 10' + b"0" * 400 + b"}",
            {"step": 4, "loss": 0.25},
        ),
        steps_per_epoch=None,
    )  # fmt: skip
    assert found == {"loss": Series((3, 4), (), (None, 0.25))}


def test_a_long_line_keeps_its_peaks() -> None:
    draw = random.Random(0)
    values = [draw.random() for _ in range(50_000)]
    values[777], values[40_001] = 99.0, -99.0
    series = Series(tuple(range(50_000)), tuple(k / 10 for k in range(50_000)), tuple(values))
    few = thinned(series)
    assert len(few.steps) <= MOST_POINTS
    assert list(few.steps) == sorted(few.steps)
    assert (few.steps[0], few.steps[-1]) == (0, 49_999)
    assert (
        max(v for v in few.values if v is not None),
        min(v for v in few.values if v is not None),
    ) == (99.0, -99.0)
    assert all(few.values[k] == values[step] for k, step in enumerate(few.steps))
    assert all(few.epochs[k] == step / 10 for k, step in enumerate(few.steps))
    assert thinned(few) == few


def run(
    name: str, *, seed: int, lr: float = 0.1, values: tuple[float | None, ...] = (1.0, 2.0)
) -> ReportedRun:
    steps = tuple(range(1, len(values) + 1))
    settings = {"lr": lr, "seed": seed}
    return ReportedRun(
        name, "finished", settings=settings, series={"train_loss": Series(steps, (), values)}
    )


def test_runs_that_differ_in_their_seed_alone_are_one_line() -> None:
    runs = [
        run("a", seed=0, values=(1.0, 2.0, None)),
        run("b", seed=0, lr=0.2),
        run("c", seed=1, values=(3.0, 5.0, None)),
    ]
    assert [[one.name for one in group] for group in seed_groups(runs)] == [["a", "c"], ["b"]]
    (chart,) = charts(runs)
    mean, single = chart.lines
    assert (mean.name, mean.run) == ("a, n = 2", "a")
    assert mean.series.values == (2.0, 3.5, None)
    assert mean.spread == ((1.0, 3.0), (2.0, 5.0), None)
    assert (single.name, single.spread) == ("b", None)
    assert mean.color != single.color


def test_seeds_that_stopped_at_different_steps_stay_apart() -> None:
    (chart,) = charts([run("a", seed=0), run("b", seed=1, values=(1.0, 2.0, 3.0))])
    assert [line.name for line in chart.lines] == ["a", "b"]
    assert [line.color for line in chart.lines] == [0, 0]
    assert [line.run for line in chart.lines] == ["a", "a"]  # one box switches them


def test_a_band_down_to_zero_has_no_logarithm() -> None:
    (chart,) = charts([run("a", seed=0, values=(1.0, 2.0)), run("b", seed=1, values=(0.0, 2.0))])
    assert chart.lines[0].series.values == (0.5, 2.0)
    assert not chart.may_be_log


def test_train_and_val_share_a_chart_and_negative_values_no_logarithm() -> None:
    series = {
        "images_per_s": Series((1,), (), (9.0,)),
        "val_loss": Series((1,), (), (-1.0,)),
        "train_loss": Series((1,), (), (2.0,)),
        "learning_rates 0": Series((1,), (), (0.1,)),
        "learning_rate": Series((1,), (), (0.1,)),
    }
    found = charts([ReportedRun("a", "finished", series=series)])
    assert [(chart.title, len(chart.lines), chart.may_be_log) for chart in found] == [
        ("loss", 2, False), ("images_per_s", 1, True), ("learning_rate", 2, True),
    ]  # fmt: skip
    assert len({line.dash for line in found[0].lines}) == 2
    assert all(math.isfinite(line.series.steps[0]) for chart in found for line in chart.lines)
