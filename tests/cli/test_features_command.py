"""`flambeau features`: numbers of the model, in the order of the images, or no file at all."""

import contextlib
import csv
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import timm
import torch
from PIL import Image

import flambeau as package
from flambeau.cli.command import main
from flambeau.data.transforms.crops import eval_image
from flambeau.images.decode import decode
from flambeau.recipes.checkpoints.atomic_checkpoint import Disk
from flambeau.recipes.models.feature_extractor import feature_extractor
from flambeau.trainer.evaluation import feature_file as writer
from flambeau.trainer.prediction.trained_model import Trained
from refused import refused as said_as_refused

MODELS = """
import torch
from torch import nn

class Odd(nn.Module):
    def forward(self, x):
        return x, x

class Folds(nn.Module):
    def forward(self, x):
        return x.reshape(-1, 8)

class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(4)
        self.odd, self.folds, self.idle = Odd(), Folds(), nn.ReLU()
        self.relu, self.fc = nn.ReLU(), nn.Linear(48, num_classes)

    def forward(self, x):
        x = self.relu(self.relu(self.pool(x)).flatten(1))
        return self.fc(self.odd(x)[0] + 0 * self.folds(x).reshape(len(x), -1))

def make(num_classes):
    torch.manual_seed(0)
    return Model(num_classes)

def five_classes():
    torch.manual_seed(0)
    return Model(5)

def frozen_backbone():
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.BatchNorm2d(3)).requires_grad_(False)

def fails():
    return nn.Linear(7, 7)

def without_head(num_classes):
    layers = nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, num_classes, 1), nn.Flatten()
    return nn.Sequential(*layers, nn.LayerNorm(num_classes))
"""


def write(folder: Path, per_class: int, *, seed: int = 0) -> Path:
    generator = np.random.default_rng(seed)
    for label, name in enumerate("ab"):
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            pixels = generator.integers(100 * label, 100 * label + 150, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index:02}.png", compress_level=0)
    return folder


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """`run` of the grey images in `images/`, of which val/ has more than a batch."""
    root = tmp_path_factory.mktemp("features")
    (root / "models.py").write_text(MODELS, encoding="utf-8")
    write(root / "images" / "train", 8)
    write(root / "images" / "val", 35, seed=1)
    flags = ["--batch-size", "4", "--precision", "fp32", "--duration", "4st"]
    with kept_process():
        assert main(["train", f"{root}/images", "--out", f"{root}/run", *flags]) == 0
    return root


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(answer: Any, *parts: str) -> None:
    """And nothing was written."""
    said_as_refused(answer, *parts)
    assert [path.name for path in Path().iterdir() if path.name.startswith((".", "f."))] == []


def listed(path: str) -> list[dict[str, str]]:
    with Path(path).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def test_through_the_head_they_are_the_logits(flambeau: Any, root: Path) -> None:
    data = root / "images" / "val"
    answer = flambeau("features", root / "run", data, "f.npy")
    assert (answer.code, answer.out) == (0, "features: 70 x 128 float32\n")
    assert "features of 70 images: f.npy, their list: f.csv" in answer.err
    features = np.load("f.npy")
    assert (features.shape, features.dtype) == ((70, 128), np.float32)

    paths = sorted(data.rglob("*.png"))
    assert listed("f.csv") == [{"path": str(p), "label": p.parent.name} for p in paths]
    predictor = package.load(root / "run")
    head = predictor.model.get_submodule("head")
    with torch.inference_mode():
        logits = head(torch.from_numpy(features).to(predictor.trained.device)).cpu()
    torch.testing.assert_close(logits, predictor(paths).logits, rtol=1e-5, atol=1e-5)


def test_several_layers_are_tensors_of_one_file(flambeau: Any, root: Path) -> None:
    data = root / "images" / "val"
    layers = [name for name, _ in package.load(root / "run").model.named_children()]
    first, last = layers[0], layers[-1]
    answer = flambeau("features", root / "run", data, f"f.safetensors --layers {last},{first}")
    assert answer.code == 0, answer
    predictor = package.load(root / "run")
    paths = sorted(data.rglob("*.png"))
    expected = feature_extractor(predictor.model, [last, first])(predictor.preprocess(paths))
    found = safetensors.torch.load_file("f.safetensors")
    assert sorted(found) == sorted([first, last, "labels"])
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value.cpu().contiguous(), rtol=1e-5, atol=1e-5)
    assert found["labels"].tolist() == [0] * 35 + [1] * 35
    with safetensors.safe_open("f.safetensors", framework="pt") as file:
        about = file.metadata()
    assert json.loads(about["classes"]) == ["a", "b"]
    assert (about["model"], about["data"]) == (str(root / "run"), str(data))

    assert flambeau("features", root / "run", data, f"g.npy --pool --layers {first}").code == 0
    pooled = found[first].mean((2, 3))
    torch.testing.assert_close(torch.from_numpy(np.load("g.npy")), pooled, rtol=1e-5, atol=1e-5)


def test_a_model_by_name_with_weights_of_a_file(flambeau: Any, photos: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet").eval()
    safetensors.torch.save_file(model.state_dict(), "w.safetensors")
    answer = flambeau(
        "features test_resnet", photos, "f.safetensors --weights w.safetensors --image-size 64"
    )
    assert answer.code == 0, answer
    found = safetensors.torch.load_file("f.safetensors")
    mean, std = (torch.tensor(model.pretrained_cfg[key]) for key in ("mean", "std"))
    rows = []
    for path in sorted(photos.rglob("*.jpg")):
        pixels = torch.from_numpy(eval_image(decode(path.read_bytes(), channels=3), 64))
        x = ((pixels / 255 - mean) / std).permute(2, 0, 1)[None]
        with torch.no_grad():
            rows.append(model.forward_head(model.forward_features(x), pre_logits=True))
    scale = float(torch.cat(rows).abs().max())
    torch.testing.assert_close(found["features"], torch.cat(rows), rtol=0.05, atol=0.05 * scale)
    assert found["labels"].tolist() == [0] * 6 + [1] * 6 + [2] * 6  # by the folders
    assert [row["label"] for row in listed("f.csv")] == ["ant"] * 6 + ["bee"] * 6 + ["cat"] * 6


def test_weights_of_a_run_see_images_as_that_run_did(flambeau: Any, photos: Path) -> None:
    quick = "--epochs 1 --batch-size 4 --image-size 32 --precision fp32 --model test_resnet"
    assert flambeau("train", photos, quick, "--out run").code == 0
    alone = "one.safetensors"
    Path(alone).write_bytes(Path("run/model.safetensors").read_bytes())
    same = "--image-size 32"
    assert flambeau("features run", photos, "run.npy").code == 0
    assert flambeau("features test_resnet", photos, f"of.npy --weights run {same}").code == 0
    assert flambeau("features test_resnet", photos, f"file.npy --weights {alone} {same}").code == 0
    run, of_run, of_file = (np.load(name) for name in ("run.npy", "of.npy", "file.npy"))
    np.testing.assert_allclose(of_run, run, rtol=1e-5, atol=1e-5)
    assert not np.allclose(of_file, run, rtol=1e-2, atol=1e-2)


def test_a_model_of_a_function_brings_its_weights(flambeau: Any, root: Path) -> None:
    make = f"{root}/models.py:make"
    data = root / "images" / "val" / "a"
    assert flambeau("features", make, data, "f.npy --layers relu#1 --image-size 8").code == 0
    features = np.load("f.npy")
    pixels = np.stack([np.array(Image.open(path)) for path in sorted(data.iterdir())])[:, None]
    x = (pixels / 255 - np.array([0.485, 0.456, 0.406])[:, None, None]) / np.array(
        [0.229, 0.224, 0.225]
    )[:, None, None]
    expected = np.maximum(x.reshape(35, 3, 4, 2, 4, 2).mean((3, 5)), 0).reshape(35, -1)
    np.testing.assert_allclose(features, expected, rtol=1e-4, atol=1e-5)
    assert all(row["label"] == "" for row in listed("f.csv"))  # the folder has no sub-folders

    assert flambeau("features", make, data, "f.safetensors --image-size 8 --force").code == 0
    assert list(safetensors.torch.load_file("f.safetensors")) == ["features"]  # and no labels


@pytest.mark.parametrize(
    ("words", "shape"),
    [("five_classes", (35, 48)), ("frozen_backbone --layers 0", (35, 3, 2, 2))],
)
def test_a_model_of_a_function_need_not_classify(
    words: str, shape: tuple[int, ...], flambeau: Any, root: Path
) -> None:
    function, *flags = words.split()
    command = f"{root}/models.py:{function}", root / "images" / "val" / "a", "f.npy", *flags
    answer = flambeau("features", *command, "--image-size 8")
    assert answer.code == 0, answer
    assert np.load("f.npy").shape == shape


def test_a_listing_in_which_labels_are_missing(flambeau: Any, root: Path) -> None:
    """The class without a name is the first of them; the numbers are those of the names."""
    image = root / "images" / "val" / "a" / "00.png"
    rows = [f"{image},dog", f"{image},", f"{image},ant"]
    Path("list.csv").write_text("\n".join(["path,label", *rows]), encoding="utf-8")
    assert flambeau("features", root / "run", "list.csv f.safetensors").code == 0
    assert safetensors.torch.load_file("f.safetensors")["labels"].tolist() == [1, -1, 0]
    with safetensors.safe_open("f.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["classes"]) == ["ant", "dog"]
    assert [row["label"] for row in listed("f.csv")] == ["dog", "", "ant"]


def test_parts_of_data_that_have_two(flambeau: Any, root: Path) -> None:
    run, images = root / "run", root / "images"
    assert flambeau("features", run, images, "t.npy --part train").code == 0
    assert flambeau("features", run, images, "v.npy --part val").code == 0
    assert (len(np.load("t.npy")), len(np.load("v.npy"))) == (16, 70)
    refused(
        flambeau("features", run, images / "val", "x.npy --part val"), "--part", "not in two parts"
    )


@pytest.mark.parametrize("name", ["f.npy", "f.safetensors"])
@pytest.mark.parametrize("workers", ["", "--workers 2"])
def test_images_that_cannot_be_read(flambeau: Any, root: Path, name: str, workers: str) -> None:
    """Left out, and everything behind them moves up."""
    good = write(Path("good"), 40)
    names = [name for name, _ in package.load(root / "run").model.named_children()]
    layers = "" if name.endswith("npy") else f"--layers {names[0]},{names[-1]}"
    assert flambeau("features", root / "run", good, f"all_{name} {layers}").code == 0
    bad = ["a/03.png", "a/20.png", "b/39.png"]
    for path in bad:
        (good / path).write_bytes(b"noise")
    command = ("features", root / "run", good, f"{name} {layers} {workers}")
    refused(flambeau(*command), "a/03.png: not a JPEG", "--skip-bad-images N")
    assert flambeau(*command, "--skip-bad-images 3").code == 0
    rows = [row["path"] for row in listed("f.csv")]
    everything = [row["path"] for row in listed(f"all_{Path(name).with_suffix('.csv')}")]
    assert rows == [path for path in everything if not path.endswith(tuple(bad))]
    kept = torch.tensor([not path.endswith(tuple(bad)) for path in everything])
    if name.endswith("npy"):
        found, whole = ({"": torch.from_numpy(np.load(p))} for p in (name, f"all_{name}"))
    else:
        found, whole = (safetensors.torch.load_file(p) for p in (name, f"all_{name}"))
    assert found.keys() == whole.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, whole[key][kept], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("test_resnet DATA f.npy", ("random values", "--pretrained or --weights FILE")),
        ("small_convnet DATA f.npy", ("no published weights", "run")),
        ("models.py:make DATA f.npy --pretrained", ("--pretrained has no effect",)),
        ("RUN DATA f.npy --pretrained", ("--pretrained is for a MODEL",)),
        ("RUN DATA f.npy --weights w.pth", ("--weights is for a MODEL",)),
        ("test_resnet DATA f.npy --pretrained --weights w", ("contradict each other",)),
        ("resnt18 DATA f.npy --pretrained", ("unknown model 'resnt18'", "did you mean 'resnet18'")),
        ("RUN DATA f.npz", ("f.npz", "must end with .npy or .safetensors")),
        ("RUN DATA gone/f.npy", ("there is no folder gone",)),
        ("RUN DATA f.npy --layers head,head", ("--layers names head twice",)),
        ("RUN DATA f.npy --layers head,", ("has an empty name",)),
        ("RUN DATA f.npy --layers head,pool", ("holds one layer, and 2 are named",)),
        ("RUN DATA f.npy --layers heat", ("no layer 'heat', did you mean 'head'?", "model are:")),
        ("RUN DATA f.npy --pool", ("--pool has no effect",)),
        ("RUN gone f.npy", ("gone does not exist",)),
        ("gone/run DATA f.npy --pretrained", ("unknown model 'gone/run'",)),
        ("models.py:make DATA f.npy --layers odd --image-size 8", ("'odd' gives a tuple",)),
        ("models.py:make DATA f.npy --layers folds --image-size 8", ("'folds' gives (384, 8) for 64",)),
        ("models.py:make DATA f.npy --layers idle --image-size 8", ("layer 'idle' did not run",)),
        ("models.py:make DATA f.npy --layers relu --image-size 8", ("ran 2 times: ask for 'relu#0'",)),
        ("models.py:make DATA f.npy --image-size 4", ("image_size must be from 8",)),
        ("models.py:fails DATA f.npy", ("the model fails on 1 x 3 x 224 x 224: RuntimeError",)),
        ("models.py:without_head DATA f.npy", ("Name layers with --layers",)),
        ("RUN DATA f.npy --workers -1", ("--workers must be at least 0",)),
    ],
)  # fmt: skip
def test_mistakes(words: str, parts: tuple[str, ...], flambeau: Any, root: Path) -> None:
    words = words.replace("RUN", f"{root}/run").replace("DATA", f"{root}/images/val")
    refused(flambeau("features", words.replace("models.py", f"{root}/models.py")), *parts)


@pytest.mark.parametrize("there", ["f.npy", "f.csv"])
def test_existing_files_are_kept(there: str, flambeau: Any, root: Path) -> None:
    Path(there).write_text("mine", encoding="utf-8")
    command = ("features", root / "run", root / "images" / "val", "f.npy")
    answer = flambeau(*command)
    assert answer.code == 2
    assert f"{there} exists" in answer.err and "--force" in answer.err
    assert [path.name for path in Path().iterdir()] == [there]
    assert Path(there).read_text(encoding="utf-8") == "mine"
    assert flambeau(*command, "--force").code == 0
    assert (len(np.load("f.npy")), len(listed("f.csv"))) == (70, 70)


def test_what_is_read_is_not_replaced(flambeau: Any, root: Path) -> None:
    rows = f"path,label\n{root / 'images' / 'val' / 'a' / '00.png'},a\n"
    Path("f.csv").write_text(rows, encoding="utf-8")
    answer = flambeau("features", root / "run", "f.csv ./f.npy --force")
    assert answer.code == 2 and "f.csv would be written over" in answer.err
    assert Path("f.csv").read_text(encoding="utf-8") == rows


def test_an_interruption_leaves_nothing(
    flambeau: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = Trained.apply, []

    def apply(self: Trained, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(Trained, "apply", apply)
    assert flambeau("features", root / "run", root / "images" / "val", "f.npy").code == 130
    assert len(calls) == 2
    assert list(Path().iterdir()) == []


def test_a_full_disk_leaves_nothing(
    flambeau: Any, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("features", root / "run", root / "images" / "val", "f.safetensors")

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "write", full)
        refused(flambeau(*command), "f.safetensors: No space left on device")
    assert list(Path().iterdir()) == []

    class Little:
        free = 1000

    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: Little)
    answer = flambeau(*command)
    refused(answer, "f.safetensors will take 0.0", "MiB, and . has 0.00 MiB left", "--pool")
    assert list(Path().iterdir()) == []
