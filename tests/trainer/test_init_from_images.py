"""A model that begins with what it sees gets training images once, at the start of a new run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flambeau.cli.command import main
from flambeau.recipes.models.speedrun_convnet import SpeedrunConvNet
from forked_python import ALONE

WORDS = "--model speedrun_convnet --batch-size 16 --precision fp32 --device cpu --lr 0.01"


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for name, level in (("dark", 60), ("light", 190)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(24):
            pixels = draw.normal(level, 30, (16, 16, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{index}.png")
    return Path("photos")


def train(photos: Path, folder: str, words: str) -> None:
    assert main(["train", str(photos), "--out", folder, *WORDS.split(), *words.split()]) == 0


def test_the_first_layer_is_whitening_and_a_resume_keeps_it(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(photos, "run", "--duration 2ep")
    whiten = load_file("run/model.safetensors")["whiten.weight"]
    facts = json.loads(Path("run/dataset.json").read_text(encoding="utf-8"))
    names = sorted(photos.glob("*/*.png"))
    pixels = np.stack([np.asarray(Image.open(name)) for name in names]) / 255
    images = torch.tensor((pixels - facts["mean"]) / facts["std"]).permute(0, 3, 1, 2)
    expected = SpeedrunConvNet(3, 2)
    expected.init_from_images(images)  # of all, and the run has seen nine in ten
    close = torch.nn.functional.cosine_similarity(
        whiten.flatten(1), expected.whiten.weight.flatten(1)
    )
    assert close[0] > 0.99 and close[12] > 0.99

    def never(self: Any, images_NCHW: torch.Tensor) -> None:
        raise AssertionError("a resume has asked for images")

    monkeypatch.setattr(SpeedrunConvNet, "init_from_images", never)
    train(photos, "run", "--extend 1ep")
    train(photos, "from", "--duration 1ep --weights run")
    for folder in ("run", "from"):
        assert torch.equal(load_file(f"{folder}/model.safetensors")["whiten.weight"], whiten)


def test_a_model_in_a_file_of_the_user_has_it_too(photos: Path) -> None:
    Path("mine.py").write_text(
        "import torch\n\n\n"
        "class Mine(torch.nn.Sequential):\n"
        "    def init_from_images(self, images_NCHW):\n"
        "        assert images_NCHW.shape[1:] == (3, 16, 16), images_NCHW.shape\n"
        "        assert abs(float(images_NCHW.mean())) < 0.2  # normalized\n"
        "        self[1].bias.data.fill_(len(images_NCHW))\n\n\n"
        "def make(num_classes, **_):\n"
        "    return Mine(torch.nn.Flatten(), torch.nn.Linear(768, num_classes))\n",
        encoding="utf-8",
    )
    train(photos, "run", "--model mine.py:make --duration 1st --lr 1e-9")
    bias = load_file("run/model.safetensors")["1.bias"]
    torch.testing.assert_close(bias, torch.full((2,), 44.0))  # 48 less a tenth of each class


def test_the_example_of_an_export_runs_without_flambeau(photos: Path, run_python: Any) -> None:
    train(photos, "run", "--duration 4ep")
    assert main(["export", "run", "--out", "out", "--format", "safetensors"]) == 0
    assert Path("out/speedrun_convnet.py").is_file()
    light = next(photos.glob("light/*.png"))
    done = run_python("-c", ALONE, "out/example.py", light)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "light" or "light" in done.stdout.splitlines()[0]
