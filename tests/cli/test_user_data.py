"""The command on data of a user's own function: as on the files themselves, stopped, fixed and refused."""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flambeau.cli.command import main
from flambeau.data.sources.open_data import open_parts
from flambeau.images.decode import decode
from flambeau.run.run import Run
from flambeau.trainer.settings.default_folder import default_folder
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.settings.stored_settings import canonical
from refused import refused

DATA = """
from pathlib import Path

class Photos:
    def __init__(self, folder):
        self.files = sorted(Path(folder).rglob("*.png"))
        self.targets = [file.parent.name for file in self.files]
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index):
        return self.files[index].read_bytes(), self.targets[index]

def both():
    return Photos("images/train"), Photos("images/val")

def one():
    return Photos("images/train")
"""
LINEAR = """
from torch import nn

def make(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""
SHORT = "--model linear.py:make --epochs 2 --batch-size 4 --precision fp32"


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.py").write_text(DATA, encoding="utf-8")
    (tmp_path / "linear.py").write_text(LINEAR, encoding="utf-8")
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("flambeau_data_"):
            del sys.modules[name]


def without_clock(run: str) -> list[dict[str, Any]]:
    lines = Path(run, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    clock = {"images_per_s", "data_wait"}
    return [{k: v for k, v in json.loads(line).items() if k not in clock} for line in lines]


def weights(run: str) -> bytes:
    return Path(run, "model.safetensors").read_bytes()


def edit(old: str, new: str) -> None:
    text = Path("data.py").read_text(encoding="utf-8")
    assert old in text
    Path("data.py").write_text(text.replace(old, new), encoding="utf-8")


# ---------------------------------------------------------------- as on the files


def test_a_run_is_that_on_the_folder(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, "--out folder", SHORT).code == 0
    assert flambeau("train data.py:both --out own", SHORT).code == 0
    assert flambeau("train data.py:both --out workers --workers 2", SHORT).code == 0
    assert weights("own") == weights("workers") == weights("folder")
    assert without_clock("own") == without_clock("workers") == without_clock("folder")
    figures = [
        flambeau("evaluate own --json", data).out
        for data in ("data.py:both", str(images / "val"), "data.py:both --workers 1")
    ]
    assert figures[0] == figures[1] == figures[2]
    assert json.loads(flambeau("evaluate own --json data.py:one").out)["images"] == 16


def test_a_part_is_held_out_where_there_is_no_pair(flambeau: Any, images: Path) -> None:
    code, _, err = flambeau("train data.py:one", SHORT)
    assert code == 0
    assert "14 images to train on, 2 to evaluate on" in err
    settings = canonical(Settings(data="data.py:one"))
    assert default_folder(settings, {"data": settings.data}) == Path("runs/data-one")


def test_a_stopped_run_goes_on_to_the_same_bits(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert flambeau("train data.py:both --out whole", SHORT).code == 0
    original = Run.step

    def with_signal(self: Run, loss: torch.Tensor) -> None:
        if self.state.step == 4:
            signal.raise_signal(signal.SIGTERM)
        original(self, loss)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", with_signal)
        assert flambeau("train data.py:both --out run", SHORT).code == 75
    edit("class Photos", "# a remark\nclass Photos")
    code, _, err = flambeau("train data.py:both --out run --workers 1", SHORT)
    assert (code, "going on from step 5 of 8" in err) == (0, True)
    assert weights("run") == weights("whole")


def test_a_run_does_not_go_on_with_other_data(flambeau: Any, images: Path) -> None:
    command = ("train data.py:both --out run", SHORT)
    assert flambeau(*command).code == 0
    edit("self.files = sorted(", "self.files = sorted(")
    (images / "train" / "b" / "03.png").unlink()
    refused(flambeau(*command), "the training data have changed", "16 images then, 15 now")


def test_pack(flambeau: Any, images: Path) -> None:
    assert flambeau("pack data.py:both photos.rec").code == 0
    assert Path("photos.classes.txt").read_text().split() == ["a", "b"]
    own, packed = open_parts(Path("data.py:both")), open_parts(Path("photos_train.rec"))
    for one, other in zip(own, packed, strict=True):
        assert one is not None
        assert other is not None
        assert one.labels.tolist() == other.labels.tolist()
        assert [one.read(k) for k in range(len(one))] == [other.read(k) for k in range(len(other))]
    assert flambeau("verify photos_train.rec").code == 0
    assert "already packed" in flambeau("pack data.py:both photos.rec").out
    assert flambeau("pack data.py:one pixels.npz").code == 0
    source, _ = open_parts(Path("pixels.npz"))
    pixels = decode(own[0].read(5), channels=1)[:, :, 0]
    np.testing.assert_array_equal(source.read(5), pixels)


def test_ranks(start_ranks: Callable[..., Any], images: Path) -> None:
    words = ["train", "data.py:both", "--out", "run", *SHORT.split(), "--device", "cpu"]
    assert start_ranks(2, lambda: main(words)).results() == [0, 0]
    assert json.loads(Path("run/dataset.json").read_text())["train_samples"] == 16


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("data", "text", "parts"),
    [
        ("gone.py:load", "", ("DATA: ", "gone.py is not a file")),
        ("own.py", "", ("own.py is a Python file; say which function: ", "own.py:FUNCTION")),
        ("own.py:load", "", ("own.py has no function 'load'; DATA FILE.py:FUNCTION",)),
        ("own.py:load", "def load(:", ("own.py: SyntaxError: invalid syntax (own.py, line 1)",)),
        ("own.py:load", "def load():\n    open('x')", ("own.py, line 2: FileNotFoundError",)),
        ("own.py:load", "load = list", ("own.py:load has returned a list without any sample",)),
        ("own.py:load", "def load(): return [(b'', 0)] * 4", ("holds one class only, '0'",)),
    ],
)
def test_no_data(data: str, text: str, parts: tuple[str, ...], flambeau: Any) -> None:
    Path("own.py").write_text(text, encoding="utf-8")
    refused(flambeau("train --out run", SHORT, data), *parts)
    assert not Path("run").exists()
    if "one class" not in parts[0]:
        refused(flambeau("pack", data, "photos.rec"), *parts)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_that_is_mended_goes_on_with_the_run(
    workers: int, flambeau: Any, photos: Path
) -> None:
    """Of photos, which are not all read before training."""
    edit('Path(folder).rglob("*.png")', 'Path(folder).rglob("*.jpg")')
    edit('"images/train"', '"photos"')
    short = SHORT.replace("--epochs 2", "--epochs 3 --image-size 16 --checkpoint-every 1st")
    command = (f"train data.py:one --out run --workers {workers}", short)
    assert flambeau(command[0].replace("run", "whole"), short).code == 0
    start = "def __getitem__(self, index):\n"
    begun = "Path('run/checkpoints/step-00000005').exists()"
    edit(start, f"{start}        if {begun}:\n            raise KeyError('bucket')\n")
    lines = Path("data.py").read_text(encoding="utf-8").splitlines()
    line = lines.index("            raise KeyError('bucket')") + 1
    refused(flambeau(*command), "data.py:one, sample ", f", line {line}: KeyError: 'bucket'")
    edit(begun, "False")
    code, _, err = flambeau(*command)
    assert code == 0
    assert re.search(r"going on from step \d+ of 12", err)
    assert weights("run") == weights("whole")


def test_bad_images_are_left_out_and_listed(flambeau: Any, images: Path) -> None:
    bad = images / "train" / "b" / "03.png"
    bad.write_bytes(bad.read_bytes()[:60])
    name = "data.py:both, training sample 11"
    refused(flambeau("train data.py:both --out run", SHORT), name, "--skip-bad-images N")
    assert flambeau("train data.py:both --out run --skip-bad-images 1", SHORT).code == 0
    (listed,) = [path for path in Path("run").iterdir() if "bad" in path.name]
    assert listed.read_text().endswith(f"{name}\n")


def test_an_interrupt_in_the_function(flambeau: Any, images: Path) -> None:
    assert flambeau("train data.py:both --out run", SHORT).code == 0
    edit("def both():", "import signal\ndef both():\n    signal.raise_signal(signal.SIGINT)")
    code, out, err = flambeau("evaluate run data.py:both")
    assert (code, out) == (130, "")
    assert [line.split()[0] for line in err.splitlines()] == ["running", "flambeau:"]
