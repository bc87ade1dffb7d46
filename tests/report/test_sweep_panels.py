"""A sweep in a report: importance, bands by setting, folds side by side, the test."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flambeau.report.page import report_page
from flambeau.report.reported_run import ReportedRun, Series
from flambeau.report.sweep_panels import ReportedSweep, bands, folds, importance
from flambeau.report.words import CHINESE, ENGLISH
from flambeau.run.folder.sweep_for_report import read_sweep

FIGURE = "val_accuracy"


def run(name: str, values: list[float | None], best: float | None = None) -> ReportedRun:
    count = len(values)
    series = Series(tuple(range(count)), tuple(map(float, range(count))), tuple(values))
    figures = {} if best is None else {FIGURE: best}
    return ReportedRun(name, "finished", series={FIGURE: series}, figures=figures)


def cells(html: str) -> list[list[str]]:
    rows = re.findall("<tr>(.*?)</tr>", html, re.DOTALL)
    return [re.findall("<t[dh][^>]*>(?:<span[^>]*></span>)?([^<]*)</t[dh]>", row) for row in rows]


def test_a_band_is_the_median_and_the_middle_half_of_its_runs() -> None:
    values = [0.1, 0.2, 0.3, 0.4, 0.9]
    runs = [run(f"a{k}", [0.0, one]) for k, one in enumerate(values)]
    runs += [run("b0", [0.0, 0.5]), run("b1", [None, 0.7])]
    choices = {one.name: {"model": one.name[0]} for one in runs}
    html = bands(ReportedSweep(FIGURE, choices=choices), runs, ENGLISH)
    assert cells(html)[1:] == [
        ["a", "1", "0.3", "0.2", "0.4", "5"],
        ["b", "1", "0.6", "0.5", "0.7", "2"],
    ]
    label = re.search('aria-label="([^"]*)"', html)
    assert label is not None
    assert "a: 0.3 (0.2 … 0.4, n = 5); b: 0.6 (0.5 … 0.7, n = 2)" in label[1]
    assert html.count("<polygon") == html.count("<polyline") == 2


def test_many_numbers_are_three_bands_and_many_words_none() -> None:
    runs = [run(f"r{k}", [0.1, k / 10]) for k in range(9)]
    numbers: dict[str, dict[str, Any]] = {f"r{k}": {"lr": (k + 1) / 100} for k in range(9)}
    html = bands(ReportedSweep(FIGURE, choices=numbers), runs, ENGLISH)
    assert [row[0] for row in cells(html)[1:]] == ["0.01 … 0.03", "0.04 … 0.06", "0.07 … 0.09"]
    assert [row[-1] for row in cells(html)[1:]] == ["3", "3", "3"]
    texts: dict[str, dict[str, Any]] = {f"r{k}": {"model": f"net{k}"} for k in range(9)}
    assert bands(ReportedSweep(FIGURE, choices=texts), runs, ENGLISH) == ""


def test_no_band_without_a_difference_or_a_curve() -> None:
    same = {"a": {"lr": 0.1}, "b": {"lr": 0.1}}
    other = {"a": {"lr": 0.1}, "b": {"lr": 0.2}}
    curves = [run("a", [0.1, 0.2]), run("b", [0.1, 0.3])]
    points = [run("a", [0.1]), run("b", [0.3])]
    assert bands(ReportedSweep(FIGURE, choices=same), curves, ENGLISH) == ""
    assert bands(ReportedSweep(FIGURE, choices=other), points, ENGLISH) == ""
    assert bands(ReportedSweep("other", choices=other), curves, ENGLISH) == ""
    assert bands(ReportedSweep(FIGURE, choices=other), curves, ENGLISH) != ""


def test_folds_are_side_by_side_best_first() -> None:
    figures = {"0-1": 0.5, "0-2": 0.7, "1-1": 0.8, "1-2": 0.9, "2-1": 0.99}
    runs = [run(name, [value], value) for name, value in figures.items()]
    places = {name: (int(name[0]), int(name[2])) for name in figures}
    choices = {name: {"lr": int(name[0]) / 10} for name in figures}
    sweep = ReportedSweep(FIGURE, folds=2, choices=choices, places=places)
    assert cells(folds(sweep, runs, ENGLISH))[1:] == [
        ["1", "lr=0.1", "0.8000", "0.9000", "0.8500", "0.0707"],
        ["0", "lr=0", "0.5000", "0.7000", "0.6000", "0.1414"],
    ]
    least = ReportedSweep(FIGURE, is_max=False, folds=2, choices=choices, places=places)
    assert [row[0] for row in cells(folds(least, runs, ENGLISH))[1:]] == ["0", "1"]
    assert folds(ReportedSweep(FIGURE, places=places), runs, ENGLISH) == ""


def test_importance_says_what_may_be_chance() -> None:
    rows = [
        {"name": "lr", "share": 0.9, "is_beyond_chance": True},
        {"name": "<b>", "share": 0.1, "is_beyond_chance": False},
    ]
    html = importance(ReportedSweep(FIGURE, importance={"how": "by X", "settings": rows}), ENGLISH)
    assert cells(html)[1] == ["lr", "more than chance shows", "90%"]
    assert cells(html)[2] == ["&lt;b&gt;", "chance may do it", "10%"]
    assert "by X" in html


@pytest.mark.parametrize("stored", [{}, {"how": 3}, {"how": "x", "settings": 3}])
def test_a_file_that_no_sweep_has_written(stored: dict[str, Any]) -> None:
    assert importance(ReportedSweep(FIGURE, importance=stored), ENGLISH) == ""


def test_a_hostile_name_is_text_in_every_part() -> None:
    name = "<script>alert(1)</script>"
    runs = [run("a", [0.1, 0.2], 0.2), run("b", [0.1, 0.3], 0.3)]
    sweep = ReportedSweep(
        FIGURE,
        folds=2,
        choices={"a": {name: name}, "b": {name: 1}},
        places={"a": (0, 1), "b": (0, 2)},
        importance={"how": name, "settings": [{"name": name, "share": 1.0}]},
        test=name,
    )
    for words in (ENGLISH, CHINESE):
        page = report_page(runs, words=words, version="1", sweep=sweep)
        assert name not in page
        for section in ("bands", "fold_table", "importance", "tested"):
            assert f'id="h-{section}"' in page


def test_what_is_read_of_a_folder(tmp_path: Path) -> None:
    folders = []
    for name in ("0000-fold1", "0001-fold2-seed3"):
        folders.append(tmp_path / "trials" / name)
        folders[-1].mkdir(parents=True)
    names = {folder: folder.name for folder in folders}
    assert read_sweep(folders, names) is None
    (tmp_path / "sweep.toml").write_text(f'figure = "{FIGURE}"\nmode = "min"\nfolds = 2\n')
    lines = [{"trial": 0, "settings": {"lr": 0.1}}, [3], {"trial": 1, "settings": {"lr": 0.2}}]
    (tmp_path / "sweep.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n{torn")
    found = read_sweep(folders, names)
    assert found is not None
    assert (found.figure, found.is_max, found.folds) == (FIGURE, False, 2)
    assert found.places == {"0000-fold1": (0, 1), "0001-fold2-seed3": (1, 2)}
    assert found.choices == {"0000-fold1": {"lr": 0.1}, "0001-fold2-seed3": {"lr": 0.2}}
    (tmp_path / "sweep.toml").write_text("[")
    assert read_sweep(folders, names) is None
