"""Pictures and notebook views of evaluations of several labels and of numbers."""

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import precision_recall_curve

from flambeau import evaluate, train
from flambeau.errors import InputError
from flambeau.trainer.evaluation.label_figures import precision_recall
from flambeau.trainer.evaluation.target_plots import plot_numbers, plot_precision_recall

Flambeau = Callable[..., Any]


def test_precision_and_recall_are_those_of_scikit_learn() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = (torch.rand(60, generator=draw) * 20).round() / 20  # with ties
    labels = (torch.rand(60, generator=draw) > 0.7).float()
    recall, precision, values = precision_recall(scores, labels)
    expected_p, expected_r, expected_v = precision_recall_curve(labels, scores)
    np.testing.assert_allclose(precision.flip(0), expected_p[:-1])
    np.testing.assert_allclose(recall.flip(0), expected_r[:-1])
    np.testing.assert_allclose(values.flip(0), expected_v)
    labels[::3] = torch.nan
    known = labels.isfinite()
    recall, precision, _ = precision_recall(scores, labels)
    expected_p, expected_r, _ = precision_recall_curve(labels[known], scores[known])
    np.testing.assert_allclose(precision.flip(0), expected_p[:-1])


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_pictures(tmp_path: Path, ending: str) -> None:
    draw = torch.Generator().manual_seed(0)
    probabilities = torch.rand(50, 14, generator=draw)
    labels = (torch.rand(50, 14, generator=draw) > 0.6).float()
    labels[:, 3] = torch.nan
    names = ["_hidden", "a$b$", "猫", *map(str, range(11))]
    path = tmp_path / f"a.{ending}"
    plot_precision_recall(probabilities, labels, torch.full((14,), 0.5), names, path)
    assert path.stat().st_size > 5000
    with pytest.raises(InputError, match="exists"):
        plot_precision_recall(probabilities, labels, torch.full((14,), 0.5), names, path)
    given = torch.randn(6000, 2, generator=draw)
    given[::7, 1] = torch.nan
    path = tmp_path / f"b.{ending}"
    plot_numbers(given, given + 0.1, names[:2], path)
    assert path.stat().st_size > 5000
    plot_numbers(torch.full((3, 1), torch.nan), torch.zeros(3, 1), ["x"], path, force=True)


def test_plots_and_views_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flambeau: Flambeau
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = []
    for k in range(24):
        Image.new("RGB", (16, 16), (k * 9, k * 9, 60)).save(f"{k}.png")
        rows.append([f"{k}.png", ["", "<dark>", "<dark>|a", "a"][k % 4], k * 1.5 + 0.25, k % 2])
    for name, head, columns in (
        ("tags.csv", ["path", "labels"], (0, 1)),
        ("sizes.csv", ["path", "label"], (0, 2)),
        ("classes.csv", ["path", "label"], (0, 3)),
    ):
        with Path(name).open("w", newline="") as file:
            csv.writer(file).writerows([head, *([row[at] for at in columns] for row in rows)])
        stem = name.removesuffix(".csv")
        train(data=name, out=stem, epochs=1, batch_size=8, bar=False)
        answer = flambeau("evaluate", stem, name, "--plot", f"{stem}.png")
        evaluation: Any = evaluate(stem, name)
        assert answer.code == 0 and f"{evaluation.picture}: {stem}.png" in answer.err
        with Image.open(f"{stem}.png") as picture:
            assert min(picture.size) > 300
        page = evaluation._repr_html_()
        assert page.count("<table>") == 2 and f"{evaluation.loss:.4f}" in page
        if name != "classes.csv":
            with pytest.raises(InputError, match=r"no confusion matrix\nGive \.plot"):
                evaluation.plot_confusion("c.png")
        if name == "tags.csv":
            assert "&lt;dark&gt;" in page and "<dark>" not in page
