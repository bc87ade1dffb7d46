"""`flambeau train --find-lr`: what it says and draws, that it leaves nothing else, and what it refuses."""

import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from flambeau.trainer import find_lr
from flambeau.trainer import start as start_or_resume

FLAGS = "--model small_convnet --batch-size 8 --image-size 8"


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def curves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The curves that were made."""
    made, make = list[Any](), find_lr.find_lr

    def kept(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(start_or_resume, "try_rates", kept)
    return made


def test_it_draws_a_curve_and_leaves_nothing_else(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curves: list[Any]
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    answer = flambeau("train", images, FLAGS, "--find-lr lr.svg --out run --schedule one-cycle")
    assert answer.code == 0, answer.err
    assert "learning-rate range test: up to 100 steps" in answer.err
    (curve,) = curves
    assert curve.rates[0] == 1e-6
    assert curve.suggested is not None
    said = f"in {len(curve.rates)} steps with rates from 1e-06 to {curve.rates[-1]:.2g} the loss was lowest"
    assert said in answer.out
    assert f"--lr {curve.suggested:.2g}\ncurve: lr.svg\n" in answer.out
    shapes = ElementTree.parse("lr.svg").getroot()
    points = shapes.findall("{http://www.w3.org/2000/svg}rect[@fill='#9db4d4']")
    assert len(points) == len(curve.losses)
    assert f"Train with {curve.suggested:.2g}" in Path("lr.svg").read_text(encoding="utf-8")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert not Path("run").exists()


def first_losses(folder: Path, steps: int) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["train_loss"] for row in map(json.loads, lines) if "train_loss" in row][:steps]


@pytest.mark.parametrize("more", ["", "--accumulate 2", "--precision bf16"])
def test_its_steps_are_those_of_the_run(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch, curves: list[Any], more: str
) -> None:
    """With a rate that hardly rises, they are those of a training with that rate."""
    monkeypatch.setattr(find_lr, "_LOW", 0.05)
    monkeypatch.setattr(find_lr, "_HIGH", 0.05 + 1e-15)
    monkeypatch.setattr(find_lr, "_STEPS", 4)
    assert flambeau("train", images, FLAGS, more, "--find-lr lr.svg --lr 0.3").code == 0
    run = "--lr 0.05 --schedule constant --warmup 0st --duration 4st --log-every 1 --out run"
    assert flambeau("train", images, FLAGS, more, run).code == 0
    assert curves[0].losses == pytest.approx(first_losses(Path("run"), 4), rel=1e-5)


def test_several_processes_agree(
    flambeau: Any,
    images: Path,
    curves: list[Any],
    start_ranks: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(find_lr, "_STEPS", 10)

    def work() -> tuple[list[float], list[float], str]:
        answer = flambeau("train", images, FLAGS, "--find-lr lr.svg")
        assert answer.code == 0
        return curves[-1].rates, curves[-1].losses, answer.out

    first, second = start_ranks(2, work).results()
    assert first[:2] == second[:2]
    assert ("curve: lr.svg" in first[2], second[2]) == (True, "")
    assert Path("lr.svg").is_file()


def test_a_run_that_is_there_stays_as_it_is(flambeau: Any, images: Path) -> None:
    told = "train", images, FLAGS, "--out run --epochs 1"
    assert flambeau(*told).code == 0
    before = sorted((path, path.stat().st_mtime_ns) for path in Path("run").rglob("*"))
    answer = flambeau(*told, "--find-lr lr.svg")
    assert (answer.code, "this run is finished" in answer.out) == (0, False)
    assert "the run in run is finished, and stays as it is" in answer.err
    assert "curve: lr.svg" in answer.out
    assert flambeau(*told, "--find-lr fresh.svg --fresh").code == 0
    assert Path("lr.svg").exists() and Path("fresh.svg").exists()
    assert sorted((path, path.stat().st_mtime_ns) for path in Path("run").rglob("*")) == before


def test_a_loss_that_is_not_finite_ends_it(flambeau: Any, images: Path, curves: list[Any]) -> None:
    Path("net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n"
        "    def __init__(self, num_classes):\n        super().__init__()\n"
        "        self.last = torch.nn.LazyLinear(num_classes)\n\n"
        "    def forward(self, images):\n        return self.last(images.flatten(1)) * float('inf')\n"
    )
    answer = flambeau("train", images, "--model net.py:Net --batch-size 4 --find-lr lr.svg")
    assert answer.code == 0, answer.err
    assert "in 0 steps the loss has hardly fallen: there is no rate to propose" in answer.out
    assert "The loss has hardly fallen." in Path("lr.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--find-lr lr.png", r"lr.png: the name of this file must end with .svg"),
        ("--find-lr there.svg", r"there.svg exists\nName another file$"),
        ("--find-lr no/lr.svg", r"no/lr.svg"),
        ("--find-lr lr.svg --dry-run", r"--dry-run and --find-lr are two trials"),
        ("--find-lr lr.svg --replay-step x.pt", r"leave --find-lr out"),
        ("--find-lr", r"--find-lr needs a value"),
    ],
)
def test_wrong_input_is_told(flambeau: Any, images: Path, words: str, said: str) -> None:
    Path("there.svg").touch()
    answer = flambeau("train", words)
    assert answer.code == 2
    assert re.search(said, (answer.err or answer.out).strip()), answer
    assert not Path("lr.svg").exists()
    assert Path("there.svg").stat().st_size == 0
