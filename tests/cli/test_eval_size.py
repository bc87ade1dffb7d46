"""`--eval-size` and `--crop`: what the run evaluates, predicts and says afterwards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.data.transforms.crops import eval_image
from flambeau.trainer.api import load

SHORT = "--epochs 1 --batch-size 4 --precision fp32 --model small_convnet"


def test_images_are_evaluated_at_another_size(flambeau: Any, photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    answer = flambeau(
        "train", photos, SHORT, "--image-size 32 --eval-size 48 --crop bicubic --out", run
    )
    assert answer.code == 0
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    figures = json.loads(flambeau("evaluate", run, photos, "--json").out)
    assert figures["image_size"] == 48
    smaller = json.loads(flambeau("evaluate", run, photos, "--json --image-size 32").out)
    assert smaller["image_size"] == 32
    assert smaller["loss"] != figures["loss"]
    assert last["val_loss"] > 0

    predictor = load(run)
    assert predictor.image_size == 48
    pixels = np.asarray(Image.open(photos / "cat" / "3.jpg"))
    seen = predictor.preprocess(pixels)
    mean, std = (
        torch.tensor(v).view(3, 1, 1)
        for v in (predictor.trained.facts.mean, predictor.trained.facts.std)
    )
    expected = eval_image(pixels, 48, interpolation="bicubic")
    np.testing.assert_allclose(
        ((seen[0] * std + mean) * 255).round().permute(1, 2, 0), expected, atol=0.6
    )
    answer = flambeau(
        "train", photos, SHORT, "--image-size 32 --eval-size 32 --crop bicubic --out", run
    )
    assert (answer.code, "eval_size: 48 there, 32 now" in answer.err) == (2, True)


def test_val_figures_are_of_that_size(flambeau: Any, images: Path, tmp_path: Path) -> None:
    """With val/ in the data, `evaluate` gives what the run has logged."""
    run = tmp_path / "run"
    answer = flambeau("train", images, SHORT, "--eval-size 16 --out", run)
    assert answer.code == 0
    last = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][-1]
    figures = json.loads(flambeau("evaluate", run, images, "--json").out)
    assert figures["loss"] == pytest.approx(last["val_loss"], rel=1e-5)
    assert figures["image_size"] == 16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--eval-size 7", "eval_size must be from 8 to 16384, got 7"),
        ("--crop nearest", "crop must be one of bilinear, bicubic; got 'nearest'"),
        ("--crop bicubic", "crop = 'bicubic' has no effect on images that are all of 8 x 8"),
        (
            "--model {fixed}:make --eval-size 16",
            "cannot take eval_size = 16: the model fails on 1 x 1 x 16 x 16",
        ),
    ],
)
def test_wrong_sizes(flambeau: Any, images: Path, tmp_path: Path, flags: str, message: str) -> None:
    fixed = tmp_path / "fixed.py"
    fixed.write_text(
        "from torch import nn\n\n\ndef make(num_classes, channels, image_size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))\n"
    )
    answer = flambeau("train", images, flags.format(fixed=fixed), f"--out {tmp_path / 'run'}")
    assert answer.code == 2
    assert message in answer.err
    assert not (tmp_path / "run").exists()
