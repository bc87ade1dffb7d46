"""Floating-point images of a user's own function: through crops, statistics and training as float32."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.testing import assert_close

import flambeau as doors
from flambeau.data.datasets.device_dataset import DeviceDataset
from flambeau.data.datasets.image_dataset import ImageDataset
from flambeau.data.datasets.image_statistics import mean_std
from flambeau.data.sources.open_data import open_sources
from flambeau.data.sources.source import Source, pixel_kind
from flambeau.data.transforms.crops import eval_image, train_image
from flambeau.errors import DecodeError, InputError
from flambeau.exports.load_export import load_model
from flambeau.recipes.data.sample_order import sample_seeds
from flambeau.run.run import Run
from flambeau.trainer.prediction.predictor import Predictor
from refused import refused

DATA = """
import torch

class Photos:
    classes = ["dark", "light"]
    scale, shift = 1.0, 0.0

    def __init__(self, count, seed, side=SIDE):
        generator = torch.Generator().manual_seed(seed)
        self.targets = [k % 2 for k in range(count)]
        noise = torch.rand(count, CHANNELS, side, side, generator=generator)
        self.images = 0.6 * noise + 0.4 * torch.tensor(self.targets).view(-1, 1, 1, 1)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index] * self.scale + self.shift, self.targets[index]

class Normalized(Photos):
    scale, shift = 4.0, -2.0

class Eights(Photos):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return (image * 255).round().to(torch.uint8), label

def unit():
    return Photos(16, 0), Photos(8, 1)

def normalized():
    return Normalized(16, 0), Normalized(8, 1)

def eights():
    return Eights(16, 0), Eights(8, 1)

def torn():
    return Photos(16, 0), Normalized(8, 1)
"""
LINEAR = """
from torch import nn

def make(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""
SHORT = "--model linear.py:make --epochs 3 --batch-size 4 --precision fp32"


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("linear.py").write_text(LINEAR, encoding="utf-8")
    write_data()
    modules = set(sys.modules)
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("flambeau_data_"):
            del sys.modules[name]


def write_data(*, side: int = 12, channels: int = 3) -> None:
    text = DATA.replace("SIDE", str(side)).replace("CHANNELS", str(channels))
    Path("data.py").write_text(text, encoding="utf-8")


def sources(function: str) -> tuple[Source, Source]:
    return open_sources(Path(f"data.py:{function}"))


def weights(run: str) -> bytes:
    return Path(run, "model.safetensors").read_bytes()


def test_kinds() -> None:
    kinds = {name: pixel_kind(sources(name)[0]) for name in ("unit", "normalized", "eights")}
    assert kinds == {"unit": "unit", "normalized": "float", "eights": "uint8"}
    with Path("data.py").open("a") as file:  # of k / 255, which are 8-bit ones but for this
        file.write(
            "\nPhotos.__getitem__ = lambda self, k: (torch.zeros(3, 12, 12), self.targets[k])\n"
            "Photos.float_pixels = True\n"
        )
    assert pixel_kind(sources("unit")[0]) == "unit"


@pytest.mark.parametrize("function", ["unit", "normalized"])
@pytest.mark.parametrize("side", [12, 40])
def test_a_run_is_the_same_with_workers_and_after_a_stop(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch, function: str, side: int
) -> None:
    write_data(side=side)
    command = (f"train data.py:{function} --image-size 12", SHORT)
    assert flambeau(*command, "--out whole").code == 0
    assert flambeau(*command, "--out workers --workers 2").code == 0
    original = Run.step

    def with_signal(self: Run, loss: torch.Tensor) -> None:
        if self.state.step == 5:
            signal.raise_signal(signal.SIGTERM)
        original(self, loss)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "step", with_signal)
        assert flambeau(*command, "--out run").code == 75
    assert flambeau(*command, "--out run").code == 0
    assert weights("whole") == weights("workers") == weights("run")
    facts = json.loads(Path("whole", "dataset.json").read_text())
    assert facts["pixels"] == {"unit": "unit", "normalized": "float"}[function]


def test_the_unit_does_not_matter(flambeau: Any) -> None:
    """What is normalized is the same after the run's own normalization."""
    losses = []
    for function in ("unit", "normalized", "eights"):
        assert flambeau(f"train data.py:{function} --out {function}", SHORT).code == 0
        losses.append(
            json.loads(flambeau(f"evaluate {function} data.py:{function} --json").out)["loss"]
        )
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0] == pytest.approx(losses[2], rel=2e-2)


@pytest.mark.parametrize("make", [train_image, eval_image])
def test_crops_of_floats_are_those_of_8_bits(make: Callable[..., Any]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (50, 37, 3), dtype=np.uint8)
    floats = pixels.astype(np.float32) / np.float32(255)
    more = (7,) if make is train_image else ()
    got = make(floats, *more, 16)
    assert got.dtype == np.float32
    assert_close(got * 255, make(pixels, *more, 16).astype(np.float32), rtol=0, atol=1.01)
    with pytest.raises(DecodeError, match="another type"):
        make(floats, *more, 16, channels=3, out=torch.empty(16, 16, 3, dtype=torch.uint8))


def test_the_crop_of_an_evaluation_is_torch_s_own() -> None:
    x_CHW = torch.randn(3, 28, 28)
    got = eval_image(x_CHW.permute(1, 2, 0).contiguous().numpy(), 14)
    resized = F.interpolate(x_CHW[None], (16, 16), mode="bilinear", antialias=True)[0]
    assert_close(
        torch.from_numpy(got), resized[:, 1:15, 1:15].permute(1, 2, 0), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_and_statistics(channels: int) -> None:
    write_data(channels=channels)
    train, _ = sources("normalized")
    images = torch.stack([torch.from_numpy(np.array(train.read(k))) for k in range(16)]).double()
    mean, std = mean_std(train, channels=channels)
    assert mean == pytest.approx(images.mean((0, 1, 2)).tolist(), rel=1e-5)
    assert std == pytest.approx(images.std((0, 1, 2), correction=0).tolist(), rel=1e-5)
    other = 4 - channels
    grey, _ = mean_std(train, channels=other)
    luma = images @ torch.tensor([0.299, 0.587, 0.114]).double() if channels == 3 else images
    assert grey == pytest.approx([float(luma.mean())] * other, rel=1e-4)


def test_held_on_a_device_they_are_the_same() -> None:
    train, _ = sources("normalized")
    indices = torch.arange(9)
    seeds = sample_seeds(indices, seed=0, epoch=1)
    shape: dict[str, Any] = {"image_size": 12, "channels": 3, "train": True}
    held = DeviceDataset(train, device="cpu", **shape).batch(indices, seeds)[0][0]
    (usual, _), _ = ImageDataset(train, **shape).batch(indices, seeds)
    assert usual.dtype == torch.float32
    assert_close(held, usual, rtol=0, atol=0)


def test_what_changes_8_bits_is_refused_by_name(flambeau: Any) -> None:
    answer = flambeau("train data.py:unit --out run", SHORT, "--color-jitter 0.2")
    refused(answer, "floating-point pixels", "--color-jitter does not change")
    for data in ("unit", "normalized"):
        out = f"moved_{data}"
        answer = flambeau(f"train data.py:{data} --out {out}", SHORT, "--augment randaugment")
        assert answer.code == 0, answer
        line = "randaugment of ShearX, ShearY, TranslateX, TranslateY, Rotate alone"
        assert line in answer.out + answer.err
    for flag in ("--random-erasing 0.5", "--mixup 0.2"):
        assert flambeau("train data.py:unit --fresh --out run", SHORT, flag).code == 0
    refused(flambeau("pack data.py:unit a.rec"), "floating-point pixels", "uint8")
    refused(flambeau("train data.py:torn --out torn", SHORT), "their unit is another one")


def test_pixels_of_another_unit_are_not_evaluated(flambeau: Any, images: Path) -> None:
    for function in ("unit", "normalized", "eights"):
        assert flambeau(f"train data.py:{function} --out {function}", SHORT).code == 0
    for run, function, fits in (
        ("unit", "eights", True),
        ("eights", "unit", True),
        ("normalized", "unit", False),
        ("normalized", "eights", False),
        ("eights", "normalized", False),
    ):
        answer = flambeau(f"evaluate {run} data.py:{function}")
        if fits:
            assert answer.code == 0
        else:
            refused(answer, "their unit is another one")
    refused(flambeau("predict normalized", images), "their unit is another one")
    assert flambeau("predict unit", images).code == 0


def test_a_predictor_takes_what_the_run_was_trained_on(flambeau: Any) -> None:
    for function in ("unit", "normalized"):
        assert flambeau(f"train data.py:{function} --out {function}", SHORT).code == 0
    x_NCHW = torch.rand(5, 3, 12, 12)
    unit, normalized = doors.load("unit"), doors.load("normalized")
    assert_close(unit(x_NCHW).logits, normalized(4 * x_NCHW - 2).logits, rtol=1e-2, atol=1e-2)
    eights = (x_NCHW * 255).round().to(torch.uint8)
    assert_close(unit(eights).logits, unit(eights.float() / 255).logits)
    array = x_NCHW[0].permute(1, 2, 0).numpy()
    assert_close(unit(array).logits, unit(x_NCHW[0]).logits)
    with pytest.raises(InputError, match=r"beyond 0 \.\. 1"):
        normalized(eights)


def test_pixels_that_are_not_finite_are_bad_images(flambeau: Any) -> None:
    with Path("data.py").open("a") as file:
        file.write("\nplain = Photos.__getitem__\n"
                   "def torn_pixel(self, k):\n    image, label = plain(self, k)\n"
                   "    return (image * torch.nan if k == 5 else image), label\n"
                   "Photos.__getitem__ = torn_pixel\n")  # fmt: skip
    refused(flambeau("train data.py:unit --out run", SHORT), "sample 5", "not all finite")
    assert flambeau("train data.py:unit --out skips --skip-bad-images 2", SHORT).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "format_", "size"), [("normalized", "torch-export", 12), ("unit", "onnx", 8)]
)
def test_an_export_takes_the_numbers_that_were_learned(
    flambeau: Any, data: str, format_: str, size: int
) -> None:
    """The graph, the run, and example.py on files .npy give the same probabilities."""
    if format_ == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    assert flambeau(f"train data.py:{data} --out run --image-size {size}", SHORT).code == 0
    exported = flambeau(f"export run --out shipped --format {format_} --allow-slower")
    assert exported.code == 0, exported
    _, val = sources(data)
    images = [np.asarray(val.read(k)) for k in range(len(val))]
    wanted = doors.load("run")(images).probabilities
    served = Predictor(load_model(Path("shipped"), trust=True, say=print))
    assert_close(served(images).probabilities, wanted, rtol=1e-4, atol=1e-5)
    measured = [
        json.loads(flambeau(f"evaluate {model} data.py:{data} --json").out)["accuracy"]
        for model in ("run", "shipped")
    ]
    assert measured[0] == measured[1]
    np.save("one.npy", images[3])
    done = subprocess.run(
        [sys.executable, "shipped/example.py", "one.npy"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert float(done.stdout.split()[-1]) == pytest.approx(float(wanted[3].max()), abs=1e-4)
    Image.new("RGB", (9, 9)).save("photo.png")
    refused_by = subprocess.run(
        [sys.executable, "shipped/example.py", "photo.png"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "images of floating-point numbers" in refused_by.stderr
    card = Path("shipped/README.md").read_text()
    assert "float32, in the unit of the training images" in card
    assert "not read from image files" in card
