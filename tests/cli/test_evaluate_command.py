"""What `flambeau evaluate` and `predict` print, write and draw, and what hinders them."""

import contextlib
import csv
import errno
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics

from flambeau.cli.command import main
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk
from flambeau.trainer.prediction.trained_model import Trained
from refused import refused

LINEAR = """
from torch import nn

def make(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""
ODD = ["a, b", 'say "x"', "two\nlines", "猫咪", "[red]x", "$x_2$", "=1+1", "\x1b[31mred"]
NAMES = [*ODD, *(f"class {k}" for k in range(92))]


def write(folder: Path, names: list[str], per_class: int, *, color: bool, seed: int = 0) -> Path:
    generator = np.random.default_rng(seed)
    for label, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            low = 100 * label // len(names)
            shape = (8, 8, 3) if color else (8, 8)
            pixels = generator.integers(low, low + 150, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png", compress_level=0)
    return folder


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """`two` and `many`: runs, of grey images of 2 and color images of 100 classes; and their images."""
    root = tmp_path_factory.mktemp("evaluate")
    (root / "linear.py").write_text(LINEAR, encoding="utf-8")
    write(root / "two_images" / "train", ["a", "b"], 8, color=False)
    write(root / "two_images" / "val", ["a", "b"], 40, color=False, seed=1)
    write(root / "many_images" / "train", NAMES, 2, color=True)
    write(root / "many_images" / "val", NAMES, 2, color=True, seed=1)
    common = (
        f"--batch-size 50 --precision fp32 --duration 4st --model {root}/linear.py:make".split()
    )
    with kept_process():
        assert main(["train", f"{root}/many_images", "--out", f"{root}/many", *common]) == 0
        two = [f"{root}/two_images", "--out", f"{root}/two", *common[:-2]]
        assert main(["train", *two, "--batch-size", "4"]) == 0
    return root


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def figures_of(answer: Any) -> dict[str, Any]:
    assert answer.code == 0, answer
    figures: dict[str, Any] = json.loads(answer.out)
    return figures


def rows_of(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("name", ["two", "many"])
@pytest.mark.parametrize("workers", ["0", "2"])
def test_figures_are_those_of_the_predictions(
    name: str, workers: str, flambeau: Any, root: Path
) -> None:
    """By scikit-learn, from the CSV file alone."""
    command = ("evaluate", root / name, root / f"{name}_images", "--workers", workers)
    figures = figures_of(flambeau(*command, "--json --out p.csv"))
    rows = rows_of("p.csv")
    assert [row["path"] for row in rows] == sorted(row["path"] for row in rows)
    assert all(
        Path(row["path"]).parent.name == row["label"] for row in rows if "\x1b" not in row["label"]
    )
    names = [one["name"] for one in figures["classes"]]
    labels, predicted = ([row[what] for row in rows] for what in ("label", "predicted"))
    assert figures["images"] == len(rows) == (80 if name == "two" else 200)
    assert figures["accuracy"] == metrics.accuracy_score(labels, predicted)
    expected = metrics.confusion_matrix(labels, predicted, labels=names)
    assert figures["confusion"] == expected.tolist()
    each = metrics.precision_recall_fscore_support(labels, predicted, labels=names, zero_division=0)
    for what, values in zip(("precision", "recall", "f1", "support"), each, strict=True):
        assert [one[what] for one in figures["classes"]] == pytest.approx(values.tolist())
    macro = metrics.precision_recall_fscore_support(
        labels, predicted, zero_division=0, average="macro", labels=names
    )
    found = [figures[f"macro_{what}"] for what in ("precision", "recall", "f1")]
    assert found == pytest.approx(macro[:3])
    if name == "two":
        scores = [
            float(row["probability" if row["predicted"] == "b" else "probability_2"])
            for row in rows
        ]
        area = metrics.roc_auc_score([label == "b" for label in labels], scores)
        assert figures["auroc"] == pytest.approx(area, abs=1e-3)
        assert figures["top5_accuracy"] is None
    else:
        top = [[row["predicted"], *(row[f"predicted_{k}"] for k in range(2, 6))] for row in rows]
        hits = [label in five for label, five in zip(labels, top, strict=True)]
        assert figures["top5_accuracy"] == pytest.approx(np.mean(hits))
        assert figures["auroc"] is None
    bins: dict[int, list[tuple[float, bool]]] = {}
    for row in rows:
        share = float(row["probability"])
        bins.setdefault(int(np.ceil(share * 15)), []).append(
            (share, row["predicted"] == row["label"])
        )
    error = sum(abs(sum(c for c, _ in held) - sum(r for _, r in held)) for held in bins.values())
    assert figures["calibration_error"] == pytest.approx(error / len(rows), abs=1e-5)
    assert figures["calibration_bins"] == 15


def without_code(err: str) -> str:
    """Without the line that names the file of the model."""
    return "".join(line for line in err.splitlines(keepends=True) if line[:8] != "running ")


def test_names_of_all_kinds_survive(flambeau: Any, root: Path) -> None:
    answer = flambeau("evaluate", root / "many", root / "many_images", "--out p.csv")
    assert answer.code == 0
    assert {row["label"] for row in rows_of("p.csv")} == set(NAMES)
    assert "\x1b" not in answer.out
    lines = answer.out.splitlines()
    titles = [k for k, line in enumerate(lines) if line.startswith("the ")]
    assert [lines[k].partition(",")[0] for k in titles] == [
        "the 20 classes with the lowest F1", "the most frequent confusions"
    ]  # fmt: skip
    assert len(lines[titles[1] :]) == 22
    assert without_code(answer.err) == "predictions of 200 images: p.csv\n"


def test_text_of_two_classes(flambeau: Any, root: Path) -> None:
    figures = figures_of(flambeau("evaluate", root / "two", root / "two_images", "--json"))
    blocks = flambeau("evaluate", root / "two", root / "two_images").out.split("\n\n")
    shown = dict(line.split("  ", 1) for line in blocks[0].splitlines())
    assert shown["images"].split(",")[0].strip() == "80"
    assert shown["accuracy"].strip() == f"{figures['accuracy']:.4f}  (always 'a': 0.5000)"
    assert shown["AUROC"].strip() == f"{figures['auroc']:.4f}"
    assert shown["calibration error"].endswith("(15 bins)")
    assert blocks[1].splitlines()[0].split() == ["class", "precision", "recall", "F1", "images"]
    assert blocks[2].splitlines()[1].split() == ["a", "b"]
    table = [list(map(int, line.split()[1:])) for line in blocks[2].splitlines()[2:]]
    assert table == figures["confusion"]


def test_a_class_without_images(flambeau: Any, root: Path) -> None:
    data = write(Path("some"), ["b"], 5, color=False)
    figures = figures_of(flambeau("evaluate", root / "two", data, "--json"))
    none, some = figures["classes"]
    assert (none["support"], none["recall"]) == (0, None)
    assert some["recall"] == figures["accuracy"] == figures["macro_recall"]
    assert figures["auroc"] is None
    lines = flambeau("evaluate", root / "two", data).out.splitlines()
    assert next(line for line in lines if line.startswith("a ")).split()[2] == "-"


def test_flips_average_probabilities(flambeau: Any, root: Path) -> None:
    paths = [root / "two_images" / "val" / "a" / f"{k}.png" for k in range(3)]
    for k, path in enumerate(paths):
        Image.fromarray(np.asarray(Image.open(path))[:, ::-1].copy()).save(f"mirrored{k}.png")
    mirrored = [f"mirrored{k}.png" for k in range(3)]

    def shares(*words: Any) -> torch.Tensor:
        rows = [
            json.loads(line)
            for line in flambeau("predict", root / "two", *words, "--json").out.splitlines()
        ]
        found = [{one["class"]: one["probability"] for one in row["classes"]} for row in rows]
        return torch.tensor([[row["a"], row["b"]] for row in found])

    said = flambeau("evaluate", root / "two", root / "two_images", "--flip-tta").out
    assert ", averaged with their mirror images\n" in said
    expected = (shares(*paths) + shares(*mirrored)) / 2
    torch.testing.assert_close(shares(*paths, "--flip-tta"), expected, rtol=0, atol=3e-6)
    torch.testing.assert_close(shares(*mirrored, "--flip-tta"), expected, rtol=0, atol=3e-6)
    command = ("evaluate", root / "two", root / "two_images", "--json")
    once, flipped = (
        figures_of(flambeau(*command, more)) for more in ("", "--flip-tta --out p.csv")
    )
    assert (once["flip_tta"], flipped["flip_tta"]) == (False, True)
    losses = [
        -np.log(float(row["probability" + "_2" * (row["predicted"] != row["label"])]))
        for row in rows_of("p.csv")
    ]
    assert flipped["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    assert flipped["loss"] != once["loss"]


def test_another_image_size(flambeau: Any, root: Path) -> None:
    data = root / "two_images"
    figures = figures_of(flambeau("evaluate", root / "two", data, "--json --image-size 12"))
    assert figures["image_size"] == 12
    assert figures_of(flambeau("evaluate", root / "two", data, "--json"))["image_size"] == 8
    assert flambeau("predict", root / "two", data / "val", "--image-size 12 --out p.csv").code == 0
    refused(flambeau("evaluate", root / "two", data, "--image-size 4"), "from 8 to 16384, got 4")
    refused(
        flambeau("evaluate", root / "many", root / "many_images", "--image-size 16"),
        "was trained at 8 pixels and cannot take image_size = 16: the model fails",
    )


def test_pictures(flambeau: Any, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.setenv("MPLBACKEND", "tkagg")
    for name in ("two", "many"):
        command = ("evaluate", root / name, root / f"{name}_images")
        answer = flambeau(*command, f"--plot {name}.png --json")
        assert (answer.code, without_code(answer.err)) == (0, f"confusion matrix: {name}.png\n")
        json.loads(answer.out)
        with Image.open(f"{name}.png") as picture:
            assert 500 < picture.width < 4000
            assert len(np.unique(np.asarray(picture.convert("L")))) > 20
    Path("sub").mkdir()
    assert flambeau(*command, "--plot sub/c.svg").code == 0
    assert b"<svg" in Path("sub/c.svg").read_bytes()[:400]
    refused(
        flambeau(*command, "--plot c.bmp"),
        "c.bmp: the name of this file must end with .png or .pdf or .svg",
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused(flambeau(*command, "--plot c.png"), "pip install 'flambeau[plot]'")
    assert not Path("c.png").exists()


def test_nothing_is_overwritten_unasked(
    flambeau: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = ("evaluate", root / "two", root / "two_images")
    predict = ("predict", root / "two", root / "two_images" / "val" / "a")
    Path("p.csv").write_text("mine")
    Path("c.png").write_text("mine")
    Path("folder.csv").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(Trained, "logits", None)  # refused before any image is looked at
        refused(flambeau(*evaluate, "--out p.csv"), "p.csv exists", "--force")
        refused(flambeau(*evaluate, "--plot c.png"), "c.png exists", "--force")
        refused(flambeau(*evaluate, "--out folder.csv --force"), "folder.csv is there and no file")
        refused(
            flambeau(*evaluate, "--out /dev/null --force"),
            "/dev/null: the name of this file must end",
        )
        refused(
            flambeau(*predict, "--out p.txt"), "p.txt: the name of this file must end with .csv"
        )
        refused(flambeau(*predict, "--out p.csv"), "p.csv exists", "--force")
        refused(flambeau(*predict, "--force"), "--force replaces the file of --out")
        refused(flambeau(*predict, "--out new.csv --json"), "--out", "--json")
        refused(flambeau(*evaluate, "--out"), "--out")
    assert Path("p.csv").read_text() == Path("c.png").read_text() == "mine"
    assert flambeau(*evaluate, "--out p.csv --plot c.png --force").code == 0
    assert len(rows_of("p.csv")) == 80
    assert Path("c.png").stat().st_size > 1000
    assert flambeau(*predict, "--out p.csv --force").code == 0
    assert len(rows_of("p.csv")) == 40


def test_bad_images_are_in_no_row(flambeau: Any, root: Path) -> None:
    data = write(Path("data"), ["a", "b"], 70, color=False)
    for name in ("a/3.png", "b/69.png"):
        (data / name).write_bytes(b"noise")
    refused(flambeau("evaluate", root / "two", data, "--out p.csv"), "a/3.png", "--skip-bad-images")
    refused(flambeau("predict", root / "two", data, "--out p.csv"), "a/3.png", "--skip-bad-images")
    assert not [path for path in Path().iterdir() if "p.csv" in path.name]
    answer = flambeau("evaluate", root / "two", data, "--skip-bad-images 2 --out p.csv")
    assert answer.code == 0
    assert "138, 2 left out" in answer.out
    names = [row["path"] for row in rows_of("p.csv")]
    assert len(names) == 138
    assert not {name for name in names if name.endswith(("a/3.png", "b/69.png"))}
    assert flambeau("predict", root / "two", data, "--skip-bad-images 2 --out q.csv").code == 0
    mine, others = rows_of("p.csv"), rows_of("q.csv")
    assert [row["predicted"] for row in mine] == [row["predicted"] for row in others]
    assert [row["label"] for row in mine] == [row["label"] for row in others]


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_ctrl_c_leaves_nothing_half_written(
    verb: str, flambeau: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Trained.logits, []

    def logits(self: Trained, *args: Any, **options: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *args, **options)

    monkeypatch.setattr(Trained, "logits", logits)
    Path("p.csv").write_text("mine")
    answer = flambeau(verb, root / "two", root / "two_images", "--out p.csv --force --workers 2")
    assert (answer.code, answer.err.splitlines()[-1]) == (130, "flambeau: interrupted")
    assert [path.name for path in Path().iterdir()] == ["p.csv"]
    assert Path("p.csv").read_text() == "mine"


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
@pytest.mark.parametrize("flag", ["--out p.csv", "--plot c.png"])
def test_a_full_disk(
    verb: str, flag: str, flambeau: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (verb, flag) == ("predict", "--plot c.png"):
        refused(flambeau(verb, root / "two", root / "two_images", flag), "unknown flag --plot")
        return

    def write(self: Disk, file: int, data: memoryview) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Disk, "write", write)
    answer = flambeau(verb, root / "two", root / "two_images", flag)
    refused(answer, flag.split()[1] + ": No space left on device", printed=verb == "evaluate")
    assert (verb == "predict") or "accuracy" in answer.out  # the figures are not lost
    assert not list(Path().iterdir())


def test_a_closed_pipe_loses_no_file(root: Path, forked_python: Any) -> None:
    os.mkfifo("pipe")
    Path("errors").touch()
    words = ["-m", "flambeau", "evaluate", root / "two", root / "two_images", "--out", "p.csv"]
    process = forked_python(words, output=Path("pipe"), errors=Path("errors"))
    Path("pipe").open().close()
    code, err = process.wait(120), Path("errors").read_text(encoding="utf-8")
    assert (code, err) == (0, "predictions of 80 images: p.csv\n")
    assert len(rows_of("p.csv")) == 80


def test_a_row_per_image_as_in_the_lines(flambeau: Any, root: Path) -> None:
    what = ("predict", root / "many", root / "many_images" / "val")
    lines = [json.loads(line) for line in flambeau(*what, "--json --top 3").out.splitlines()]
    answer = flambeau(*what, "--out p.csv --top 3")
    assert (answer.out, without_code(answer.err)) == ("", "predictions of 200 images: p.csv\n")
    rows = rows_of("p.csv")
    assert list(rows[0]) == [
        "path", "label", "predicted", "probability", "predicted_2", "probability_2", "predicted_3",
        "probability_3",
    ]  # fmt: skip
    for row, line in zip(rows, lines, strict=True):
        assert (row["path"], row["label"]) == (line["image"], line["label"])
        assert row["predicted_3"] == line["classes"][2]["class"]
        assert float(row["probability"]) == pytest.approx(
            line["classes"][0]["probability"], abs=2e-6
        )
    Path("alone.png").write_bytes(Path(rows[0]["path"]).read_bytes())
    assert flambeau("predict", root / "two", "alone.png --out q.csv").code == 0
    assert [(row["path"], row["label"]) for row in rows_of("q.csv")] == [("alone.png", "")]


def test_paths_that_are_no_text(flambeau: Any, root: Path) -> None:
    good = (root / "two_images" / "val" / "a" / "0.png").read_bytes()
    Path("odd").mkdir()
    Path("odd", "bytes\udcff.png").write_bytes(good)
    assert flambeau("predict", root / "two", "odd --out p.csv").code == 0
    assert rows_of("p.csv")[0]["path"] == "odd/bytes\\udcff.png"


def test_a_bar_on_a_terminal_alone(
    flambeau: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = root / "two_images"
    commands = (
        ("evaluate", root / "two", data),
        ("predict", root / "two", data / "val", "--json"),
        ("predict", root / "two", data / "val", "--out p.csv --force"),
    )
    quiet = [flambeau(*command) for command in commands]
    assert all(
        "80 images" not in answer.err.replace("predictions of 80 images", "") for answer in quiet
    )
    for command, before in zip(commands, quiet, strict=True):
        with monkeypatch.context() as patch:
            patch.setattr(sys.stderr, "isatty", lambda: True)
            answer = flambeau(*command)
        assert (answer.code, answer.out) == (0, before.out)
        assert "80 images" in answer.err
