"""Images of 16 bits keep their levels through training, a stop, evaluation and prediction."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import flambeau as doors
from flambeau.data.sources.wide_source import PixelFormat
from flambeau.run.run import Run
from flambeau.trainer.parts import auto_settings
from refused import refused

SIDE = 20
SHORT = "--epochs 8 --batch-size 8 --model tiny_convnet --precision fp32"
PER_CLASS = 20


def pictures() -> NDArray[np.uint16]:
    """Noise of 12 bits around 200, every other one with a square that is 120 brighter: half a level of 8."""
    rng = np.random.default_rng(0)
    levels = 200 + rng.normal(0, 20, (2 * PER_CLASS, SIDE, SIDE))
    levels[1::2, 6:14, 6:14] += 120
    return levels.clip(0, 4095).astype(np.uint16)


LEVELS = pictures()


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for number, levels in enumerate(LEVELS):
        for folder, suffix in (("png", ".png"), ("tif", ".tif")):
            path = Path(folder, "ab"[number % 2], f"{number:02}{suffix}")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(levels).save(path)
        color = Path("color", "ab"[number % 2], f"{number:02}.png")
        color.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(color), np.repeat(levels[:, :, None], 3, axis=2))
    np.savez("a.npz", images=LEVELS, labels=np.arange(len(LEVELS)) % 2)
    Path("own.py").write_text(
        "import numpy as np\n\nclass Own:\n    classes = ['a', 'b']\n"
        "    images = np.load('a.npz')['images']\n    targets = [k % 2 for k in range(len(images))]\n"
        "    def __len__(self):\n        return len(self.targets)\n"
        "    def __getitem__(self, k):\n        return self.images[k], self.targets[k]\n\n"
        "def data():\n    return Own(), Own()\n"
    )
    yield


@pytest.mark.parametrize("data", ["png", "tif", "color", "a.npz", "own.py:data"])
def test_12_bits_in_files_of_16_are_learned(flambeau: Any, data: str) -> None:
    trained = flambeau(f"train {data} --out run", SHORT)
    assert trained.code == 0
    assert "images of 16 bits, with all their levels" in trained.out + trained.err
    facts = json.loads(Path("run", "dataset.json").read_text())
    assert facts["pixels"] == "uint16"
    assert facts["mean"][0] == pytest.approx(LEVELS.mean(), rel=0.03)
    assert facts["std"][0] == pytest.approx(LEVELS.std(), rel=0.2)
    answer = flambeau(f"evaluate run {data} --json")
    assert json.loads(answer.out)["accuracy"] > 0.95
    assert "scale" not in answer.err


@pytest.mark.parametrize("augment", ["", "--augment randaugment --color-jitter 0.4"])
def test_a_stop_changes_no_bit(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch, augment: str
) -> None:
    whole = flambeau("train png --out whole", SHORT, augment)
    assert whole.code == 0
    assert ("without Posterize, Solarize" in whole.out + whole.err) == bool(augment)
    original = Run.step

    def with_signal(self: Run, loss: torch.Tensor) -> None:
        if self.state.step == 5:
            signal.raise_signal(signal.SIGTERM)
        original(self, loss)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", with_signal)
        assert flambeau("train png --out run", SHORT, augment).code == 75
    assert flambeau("train png --out run", SHORT, augment).code == 0
    bits, resumed = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "run"))
    assert bits == resumed


def test_a_predictor_takes_files_arrays_and_levels(flambeau: Any) -> None:
    assert flambeau("train png --out run", SHORT).code == 0
    model = doors.load("run")
    wanted = model("png/b/01.png").logits
    levels = LEVELS[1]
    for image in (
        levels,
        torch.from_numpy(levels),
        levels.astype(np.float32),
        Image.open("tif/b/01.tif"),
    ):
        torch.testing.assert_close(model(image).logits, wanted)
    with pytest.raises(doors.InputError, match="8 bits per level"):
        model(levels.astype(np.uint8))


def test_an_image_of_8_bits_is_refused_by_name(flambeau: Any) -> None:
    assert flambeau("train png --out run", SHORT).code == 0
    Image.new("L", (SIDE, SIDE)).save("png/a/00.png")
    refused(flambeau("evaluate run png --all"), "00.png", "8 bits per level")


def test_a_run_that_made_8_bits_of_them_goes_on(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As runs of earlier versions did."""
    with monkeypatch.context() as patch:
        patch.setattr(auto_settings, "found_format", lambda *_, **__: PixelFormat("uint8", None))
        assert flambeau("train png --out run", SHORT).code == 0
    assert json.loads(Path("run", "dataset.json").read_text())["pixels"] == "uint8"
    assert flambeau("train png --extend 1ep --out run").code == 0
    assert flambeau("evaluate run png").code == 0


def test_one_image_of_8_bits_keeps_all_of_them_at_8(flambeau: Any) -> None:
    Image.new("L", (SIDE, SIDE)).save("png/a/00.png")
    assert flambeau("train png --out run", SHORT).code == 0
    assert json.loads(Path("run", "dataset.json").read_text())["pixels"] == "uint8"


def test_pixels_of_another_scale_are_said(flambeau: Any) -> None:
    assert flambeau("train png --out run", SHORT).code == 0
    for path in Path("png").rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(path)) * 16).save(path)
    for command in ("evaluate run png", "predict run png"):
        assert "their scale may be another one" in flambeau(command).err


def test_a_check_looks_at_all_levels(flambeau: Any) -> None:
    assert "blank" not in flambeau("check png").out


def test_pages_that_are_not_read_are_said(flambeau: Any) -> None:
    for path in Path("tif").rglob("*.tif"):
        image = Image.open(path)
        image.load()
        image.save(path, save_all=True, append_images=[image, image])
    line = "40 of 40 images looked at have several pages"
    assert line in flambeau("check tif").out
    trained = flambeau("train tif --out run", SHORT, "--epochs 1")
    assert line in trained.out + trained.err
    assert line in flambeau("evaluate run tif --all").err
    assert line in flambeau("predict run tif").err
    assert line in flambeau("features run tif tif.npy").err
    found = json.loads(flambeau("check tif --json").out)
    assert found["several_pages"] == {"images": 40, "looked_at": 40}
    assert "several pages" not in flambeau("predict run png").err
