"""The figure of several runs against their settings."""

import re
from typing import Any

from flambeau.report.reported_run import ReportedRun, Series
from flambeau.report.slices_panel import slices
from flambeau.report.words import CHINESE, ENGLISH


def run(
    name: str, accuracy: float | None, *, state: str = "finished", **settings: Any
) -> ReportedRun:
    figures = {} if accuracy is None else {"val_accuracy": accuracy}
    return ReportedRun(name, state, settings={"best": "val_accuracy", **settings}, figures=figures)


def places(html: str) -> list[tuple[float, float]]:
    found = re.findall(r'<circle class="point" cx="([\d.]+)" cy="([\d.]+)"', html)
    return [(float(x), float(y)) for x, y in found]


def test_rates_over_decades_are_drawn_by_their_logarithms() -> None:
    runs = [run(f"{n}", 0.5 + n / 10, lr=10.0**-n) for n in range(4)]
    (x0, y0), (x1, _), (x2, _), (x3, y3) = places(slices(runs, ["lr"], ENGLISH))
    assert x0 > x1 > x2 > x3
    assert abs((x0 - x1) - (x2 - x3)) < 0.05
    assert y3 < y0  # a better figure stands higher


def test_names_have_places_of_their_own_and_each_setting_its_plot() -> None:
    runs = [run(f"{n}", n / 10, model="ab"[n % 2], mixup=0.1 * n) for n in range(4)]
    html = slices(runs, ["model", "mixup", "seed"], CHINESE)
    assert re.findall(r"<figcaption>(.*?)</figcaption>", html) == ["model", "mixup"]
    assert len({x for x, _ in places(html)[:4]}) == 2
    assert "设置" in html


def test_runs_without_the_figure_are_left_out() -> None:
    series = Series((1, 2), (), (0.1, 0.7))
    going = ReportedRun("on", "running", settings={"lr": 3.0}, series={"val_accuracy": series})
    runs = [run("a", 0.2, lr=1.0), run("b", 0.4, lr=2.0), run("c", None, lr=9.0), going]
    html = slices(runs, ["lr"], ENGLISH)
    assert len(places(html)) == 3
    assert "on: lr = 3.0, val_accuracy = 0.7" in html
    assert slices(runs[:3], ["lr"], ENGLISH) == ""


def test_text_of_a_run_is_escaped() -> None:
    runs = [run(f"<b>{n}", n / 10, model=f"<script>{n}") for n in range(3)]
    assert "<script>" not in slices(runs, ["model"], ENGLISH)
    assert "<b>" not in slices(runs, ["model"], ENGLISH)


def test_strange_values() -> None:
    values = [True, None, 10**400, float("nan"), {"a": 1}, "x"]
    runs = [run(f"{n}", n / 10, lr=value) for n, value in enumerate(values)]
    assert len(places(slices(runs, ["lr"], ENGLISH))) == 6
