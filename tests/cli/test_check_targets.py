"""`flambeau check` takes the targets, groups and splits that `train` takes."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.targets import TargetChoice

Flambeau = Callable[..., Any]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """20 images of 10 patients; the last patient is on both sides, and so is one picture."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    rows = []
    for k in range(20):
        pixels = draw.integers(0, 255, (24, 24, 3)).astype(np.uint8)
        Image.fromarray(pixels).resize((48, 48)).save(f"{k}.png")
        fold = "val" if k in (3, 2, 19) else "train"
        rows.append([f"{k}.png", "ab"[k % 2], k * 1.5, "x,y" if k % 3 else "y", f"p{k // 2}", fold])
    Path("19.png").write_bytes(Path("0.png").read_bytes())
    with Path("all.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["path", "kind", "size", "tags", "patient", "fold"], *rows])
    return tmp_path / "all.csv"


def kinds(flambeau: Flambeau, *words: str) -> dict[str, Any]:
    answer = flambeau("check", "all.csv", "--json", *words)
    assert answer.code in (0, 1), answer.err
    return {one["kind"]: one for one in json.loads(answer.out)["findings"]}


def test_groups_and_copies_on_both_sides_are_findings(data: Path, flambeau: Flambeau) -> None:
    words = ("--target", "kind", "--split", "fold", "--group", "patient")
    found = kinds(flambeau, *words)
    assert found["leaks"]["found"][0]["images"] == ["19.png", "0.png"]
    [row] = found["groups"]["found"]
    assert row["note"] == "p9: 1 to train on, 1 to validate on"
    assert row["images"] == ["19.png", "18.png"]
    assert found["groups"]["drop"] == ["18.png"]
    assert "groups" not in kinds(flambeau, *words[:-2])
    text = flambeau("check", "all.csv", *words)
    assert text.code == 1
    assert "groups: 1 group with images on both sides of the split" in text.out
    answer = flambeau("check", "all.csv", *words, "--out", "clean.csv")
    assert "next: flambeau train clean.csv --group patient" in answer.err
    train, val = open_sources(Path("clean.csv"), choice=TargetChoice(group="patient"))
    assert (len(train), len(val)) == (15, 2)  # without 18.png, and copies of two classes
    assert [*train.groups][:2] == ["p0", "p2"]  # type: ignore[attr-defined]


def test_the_targets_of_the_run_that_is_named(data: Path, flambeau: Flambeau) -> None:
    """Without flags of its own they are those that the run has learned."""
    words = ("--target", "size", "--image-size", "16", "--epochs", "1", "--out", "run")
    assert flambeau("train", "all.csv", *words, "--model", "tiny_convnet").code == 0
    found = flambeau("check", "all.csv", "--model", "run", "--json")
    assert found.code in (0, 1), found.err
    assert json.loads(found.out)["findings"] == list(kinds(flambeau, "--target", "size").values())


def test_a_group_held_out_has_no_finding(data: Path, flambeau: Flambeau) -> None:
    assert "groups" not in kinds(flambeau, "--target", "kind", "--group", "patient")


def test_tasks_and_columns(data: Path, flambeau: Flambeau) -> None:
    found = flambeau("check", "all.csv", "--json", "--target", "size")
    assert json.loads(found.out)["classes"] == 1
    words = ("--task", "multilabel", "--target", "tags", "--label-separator", ",")
    assert json.loads(flambeau("check", "all.csv", "--json", *words).out)["classes"] == 2
    answer = flambeau("check", "all.csv", *words, "--out", "clean.csv")
    assert "flambeau train clean.csv --task multilabel --label-separator ," in answer.err
    train, _ = open_sources(Path("clean.csv"), choice=TargetChoice("multilabel", separator=","))
    assert train.classes == ("x", "y")
    answer = flambeau("check", "all.csv", "--target", "size", "--out", "sizes.csv")
    assert "next: flambeau train sizes.csv --target size" in answer.err
    train, _ = open_sources(Path("sizes.csv"), choice=TargetChoice(columns=("size",)))
    assert train.classes == ("size",)
    for wrong, message in (
        (("--target", "sise"), "did you mean 'size'?"),
        (("--task", "tagging"), "tagging"),
        (("--group", "doctor", "--target", "kind"), "no column 'doctor'"),
    ):
        answer = flambeau("check", "all.csv", *wrong)
        assert answer.code == 2 and message in answer.err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--target", "kind"), "of 2 classes"),
        (("--target", "size"), "with 1 number each"),
        (("--target", "tags", "--task", "multilabel"), "of 2 labels"),
    ],
)
def test_the_first_line_says_what_is_learned(
    data: Path, flambeau: Flambeau, words: tuple[str, ...], what: str
) -> None:
    assert flambeau("check", "all.csv", *words).out.startswith(f"20 images {what}: ")


def test_an_empty_label_leads_to_the_other_tasks(data: Path, flambeau: Flambeau) -> None:
    Path("some.csv").write_text("path,label\n0.png,a\n1.png,\n2.png,b\n")
    answer = flambeau("train", "some.csv")
    assert answer.code == 2
    assert "some.csv, line 3 has no label" in answer.err
    assert "give --task multilabel" in answer.err
