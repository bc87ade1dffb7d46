"""`flambeau.export`: any classifier, measured on what its user has, with the answers of the model itself."""

import copy
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import flambeau as doors
from flambeau.errors import InputError
from flambeau.exports import steps
from flambeau.exports.formats.all_formats import FORMATS
from flambeau.exports.formats.classifier import first_output
from flambeau.exports.load_export import load_export
from flambeau.exports.served_model import ServedModel
from flambeau.trainer.prediction.predictor import Predictor
from forked_python import ALONE

MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]
CLASSES = ["day", "night"]
PLAIN = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
TRANSFORM = transforms.Compose([transforms.Resize(28), transforms.CenterCrop(24), PLAIN])
SQUASHED = transforms.Compose([transforms.Resize((24, 24)), PLAIN])


class Net(nn.Module):
    """With BatchNorm and dropout, so that the mode matters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.drop(self.body(x).mean((2, 3))))
        return logits


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Net:
    """In the mode of training; the folder of the test has images of 24 x 24."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(steps, "SLOWER", 1e9)  # of a network of microseconds
    draw = np.random.default_rng(1)
    for label, name in enumerate(CLASSES):
        Path("photos", name).mkdir(parents=True)
        for number in range(6):
            pixels = draw.integers(90 * label, 90 * label + 120, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"photos/{name}/{number}.png")
    torch.manual_seed(0)
    net = Net()
    for _ in range(20):  # so that running statistics are those of the images
        net(batch()[0])
    return net


def batch() -> tuple[Tensor, Tensor]:
    """All images as the user's own loader gives them, not resized: they have the size of the model."""
    images, targets = next(iter(DataLoader(ImageFolder("photos", PLAIN), batch_size=99)))
    return images, targets


def files() -> list[str]:
    return [path for path, _ in ImageFolder("photos").samples]


def own_logits(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = copy.deepcopy(model).eval()(images)
    return logits


def export(model: Any, example: Any, out: str = "out", **options: Any) -> Any:
    options = {"preprocess": TRANSFORM, "classes": CLASSES, "say": lambda _: None, **options}
    return doors.export(model, example, out, **options)


@pytest.mark.parametrize("name", ["torch-export", "onnx"])
def test_the_answers_are_those_of_the_model(model: Net, name: str) -> None:
    if name == "onnx":
        pytest.importorskip("onnxscript")
    before = copy.deepcopy(model.state_dict())
    result = export(model, batch(), format=name)
    assert model.training
    assert model.drop.training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])

    expected = own_logits(model, batch()[0])
    got = Predictor(load_export(Path("out")))(files())
    torch.testing.assert_close(got.logits, expected, rtol=1e-5, atol=1e-5)
    assert got.names == ("day", "night")
    right = float((expected.argmax(1) == batch()[1]).double().mean())
    assert [one["accuracy"] for one in result.steps] == [right, right]
    assert [one["step"] for one in result.steps] == ["model", name]
    assert [one["agreement"] for one in result.steps] == [1.0, 1.0]
    assert result.folder == Path("out")
    assert repr(result).startswith(f"ExportResult(out: {name}, ")
    assert "same answer 100.00%" in result._repr_html_()
    assert doors.evaluate(Predictor(load_export(Path("out"))), "photos").accuracy == right


def test_example_script_has_the_answers_without_flambeau(model: Net, run_python: Any) -> None:
    export(model, batch()[0])
    done = run_python("-c", ALONE, "out/example.py", *files())
    assert done.returncode == 0, done.stderr
    shares = own_logits(model, batch()[0]).softmax(1)
    for line, file, share in zip(done.stdout.splitlines(), files(), shares, strict=True):
        name, _, answer = line.rpartition(": ")
        assert name == file
        label, number = answer.split()
        assert label == CLASSES[int(share.argmax())]
        assert float(number) == pytest.approx(float(share.max()), abs=2e-5)
    told = json.loads(Path("out/export.json").read_text())
    assert told["temperature"] is None  # nothing can be calibrated without labels
    assert "calibrated" not in Path("out/README.md").read_text()
    assert told["settings"] == {"model": "Net", "image_size": 24, "crop": "bilinear"}
    assert "| training data | not known |" in Path("out/README.md").read_text()


@pytest.mark.parametrize("transform", [TRANSFORM, SQUASHED], ids=["crop", "squash"])
def test_images_of_any_size_are_resized_as_by_the_transform(
    model: Net, transform: transforms.Compose, run_python: Any
) -> None:
    export(model, batch(), preprocess=transform)
    coarse = np.random.default_rng(2).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((90, 60), Image.Resampling.BICUBIC)
    image.save("wide.png")
    expected = own_logits(model, transform(image)[None])
    done = run_python("out/example.py", "wide.png")
    assert done.returncode == 0, done.stderr
    share = float(done.stdout.split()[-1])
    assert share == pytest.approx(float(expected.softmax(1).max()), abs=2e-3)
    got = Predictor(load_export(Path("out")))("wide.png")
    assert float(got.probabilities.max()) == pytest.approx(share, abs=1e-5)


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format whose file is read by nobody: tracing a model takes a second, and shows nothing here."""
    models: list[ServedModel] = []

    def write(model: ServedModel, path: Path) -> None:
        models.append(copy.deepcopy(model))
        path.write_bytes(b"a graph")

    kept = dataclasses.replace(
        FORMATS["torch-export"],
        write=write,
        open=lambda path, threads, permission: first_output(models[-1]),
        check=lambda path: None,
    )
    monkeypatch.setitem(FORMATS, "torch-export", kept)


def pixels() -> Any:
    return np.stack([np.asarray(Image.open(file)) for file in files()])


FORMS = {
    "batch": (batch, True),
    "files": (files, False),
    "folder": (lambda: "photos", True),
    "path": (lambda: Path("photos"), True),
    "list": (lambda: [*batch()], True),
    "input": (lambda: batch()[0], False),
    "images": (lambda: [Image.open(file) for file in files()], False),
    "pixels": (pixels, False),
    "tensor": (lambda: torch.from_numpy(pixels().transpose(0, 3, 1, 2).copy()), False),
}


@pytest.mark.usefixtures("in_memory")
@pytest.mark.parametrize("name", FORMS)
def test_all_forms_of_an_example_measure_the_same(model: Net, name: str) -> None:
    make, has_labels = FORMS[name]
    result = export(model, make())
    expected = own_logits(model, batch()[0])
    right = float((expected.argmax(1) == batch()[1]).double().mean())
    told = json.loads(Path("out/export.json").read_text())
    assert told["images"] == {"measured": 12, "of": 12}
    assert [one["agreement"] for one in result.steps] == [1.0, 1.0]
    assert result.steps[-1]["accuracy"] == (right if has_labels else None)


def test_steps_are_those_of_the_command(model: Net) -> None:
    pytest.importorskip("onnxscript")
    lines: list[str] = []
    result = export(
        model,
        batch(),
        format="onnx",
        fold=True,
        quantize="int8",
        min_agreement=0.5,
        say=lines.append,
    )
    assert [one["step"] for one in result.steps] == ["model", "fold", "onnx", "int8"]
    assert "fold: 1 of 1 BatchNorms" in lines
    export(model, batch(), "half", quantize="bf16", min_agreement=0.5, calibrate=None)
    options = {"format": "onnx", "quantize": "int8", "calibrate": files()[:4]}
    export(model, batch(), "other", min_agreement=0.1, **options)


def test_compiled_frozen_half_and_double_models(model: Net) -> None:
    expected = own_logits(model, batch()[0])
    model.requires_grad_(False)
    for name, other in (
        ("compiled", torch.compile(model, backend="eager")),
        ("double", copy.deepcopy(model).double()),
        ("frozen", model),
    ):
        export(other, batch(), name)
        got = Predictor(load_export(Path(name)))(files()).logits
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_run_of_the_command(exported_run: Path, tmp_path: Path) -> None:
    predictor = doors.load(exported_run)
    photos = exported_run.parent / "photos"
    out = tmp_path / "out"
    result = doors.export(predictor, photos, out, allow_slower=True, say=lambda _: None)
    assert result.steps[0]["step"] == "run"
    assert json.loads((out / "export.json").read_text())["settings"]["optimizer"] == "sgd"
    some = sorted(photos.rglob("*.png"))[::7]
    ours = Predictor(load_export(out))(some).logits
    torch.testing.assert_close(ours, predictor(some).logits, rtol=1e-4, atol=1e-4)
    for name, given in (("preprocess", TRANSFORM), ("classes", CLASSES)):
        with pytest.raises(InputError, match=f"{name} is that of the run: leave it out"):
            doors.export(predictor, photos, tmp_path / "no", **{name: given})
    with pytest.raises(InputError, match="is an export already"):
        doors.export(Predictor(load_export(out)), photos, tmp_path / "no")


class Three(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class Dropped(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.5))


class Kept(Net):
    """With a tensor that autograd made."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.head.weight * 2


def noise() -> Tensor:
    return torch.rand(4, 3, 24, 24)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"example": noise}, "example is not what preprocess makes of images of 8 bits: .*off a whole"),
        (
            {"preprocess": {"image_size": 24, "mean": [0.5] * 3, "std": STD}},
            "Give the mean and std by which the batch was normalized",
        ),
        ({"preprocess": {"image_size": 32, "mean": MEAN, "std": STD}}, r"\(N, 3, 32, 32\)"),
        ({"preprocess": {"image_size": 24, "mean": [0.5], "std": [0.5]}}, "the model fails on 1 x 1"),
        ({"preprocess": None}, "give preprocess, too"),
        ({"preprocess": None, "classes": None}, "give preprocess and classes, too"),
        ({"classes": ["a", "b", "c"]}, r"logits of shape \(N, 3\); on 1 x 3 x 24 x 24 it gives"),
        ({"model": Three}, "it gives tuple"),
        ({"model": Kept}, "the model cannot be copied, which keeps yours as it is: Only Tensors"),
        ({"model": lambda: 5}, "must be a torch.nn.Module, or what flambeau.load"),
        ({"model": lambda: nn.DataParallel(Net())}, "such as model.module"),
        ({"format": "safetensors"}, "no name stands for the class of this model"),
        ({"format": "onxx"}, "format must be one of .* got 'onxx'; did you mean 'onnx'"),
        ({"quantize": "qat"}, "quantize must be one of int8, dynamic, fp16, bf16, got 'qat'"),
        ({"quantize": "int8"}, 'quantize="int8" needs format="onnx"'),
        ({"calibrate": "photos"}, 'calibrate= is for the ranges of quantize="int8"'),
        ({"min_agreement": 2}, "min_agreement= must be from 0 to 1, got 2"),
        ({"example": lambda: (batch()[0], batch()[1] + 1)}, "go from 1 to 2, and classes has 2 names"),
        ({"example": lambda: (batch()[0], batch()[1][:3])}, r"labels of example must be \(12,\)"),
        ({"example": lambda: (batch()[0], batch()[1] / 2)}, "whole numbers, got"),
        ({"example": lambda: batch()[0][:0]}, "example has no image"),
        ({"example": list}, "example has no image"),
        ({"example": "gone"}, "gone"),
        ({"out": "photos"}, "photos exists: name another folder with out="),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_and_nothing_written(
    model: Net, changes: dict[str, Any], why: str
) -> None:
    changes = {key: value() if callable(value) else value for key, value in changes.items()}
    options = {"model": model, "example": batch(), "out": "out"}
    options |= {"preprocess": TRANSFORM, "classes": CLASSES}
    before = sorted(Path().iterdir())
    with pytest.raises(InputError, match=why):
        doors.export(**{**options, **changes})
    assert sorted(Path().iterdir()) == before


def test_a_model_that_answers_at_random_is_refused(model: Net) -> None:
    with pytest.raises(InputError, match="gives other answers to the same images"):
        export(Dropped(), batch())
    assert model.training


def test_help_shows_every_keyword() -> None:
    parameters = inspect.signature(doors.export).parameters
    assert [*parameters] == [
        "model", "example", "out", "preprocess", "classes", "format", "fold", "reparameterize",
        "quantize", "calibrate", "min_agreement", "allow_slower", "say",
    ]  # fmt: skip
    told = inspect.getdoc(doors.export) or ""
    for name in parameters:
        assert f"    {name}: " in told


NET = """
from torch import nn

def build(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(32, num_classes),
    )
"""


@pytest.fixture
def own_run(model: Net) -> nn.Module:
    """The model of a finished run of a user's own loop, in the folder `run`."""
    del model
    Path("net.py").write_text(NET)
    names: dict[str, Any] = {}
    exec(NET, names)
    torch.manual_seed(0)
    net: nn.Module = names["build"](2)
    data = ImageFolder("photos", TRANSFORM)
    run = doors.Run(
        "run", net, torch.optim.SGD(net.parameters(), lr=0.1), data, duration="2ep", batch_size=4,
        builder="net.py:build", preprocess=TRANSFORM, classes=CLASSES, bar=False,
    )  # fmt: skip
    for _ in run.epochs():
        for images, targets in run.batches():
            run.step(nn.functional.cross_entropy(net(images), targets))
    return net


def test_a_run_of_an_own_loop(own_run: nn.Module, flambeau: Any) -> None:
    answer = flambeau("export run --out shipped --data photos --fold")
    assert answer.code == 0, answer.err
    got = Predictor(load_export(Path("shipped")))(files()).logits
    torch.testing.assert_close(got, own_logits(own_run, batch()[0]), rtol=1e-5, atol=1e-5)
    Path("net.py").unlink()
    answer = flambeau("predict shipped photos/day --json")
    assert answer.code == 0, answer.err
    assert flambeau("verify shipped").code == 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("", "which has not noted its data: name labelled images to measure on with --data DATA"),
        ("--data photos --prune 0.5", "--prune would have to train on them"),
        ("--data photos --format onnx --quantize qat", "--quantize qat would have to train"),
        ("--data photos --format onnx --quantize int8", "for the ranges of int8 with --calibrate"),
        ("--data photos --format safetensors", "is in your own file"),
    ],
)
@pytest.mark.usefixtures("own_run")
def test_what_an_own_loop_does_not_say_is_asked_for(flambeau: Any, words: str, why: str) -> None:
    answer = flambeau(f"export run --out shipped {words}")
    assert answer.code == 2
    assert why in answer.err
    assert not Path("shipped").exists()


@pytest.mark.usefixtures("in_memory")
@pytest.mark.parametrize("side", [True, 20, 10**9, "40"])
def test_an_edited_side_is_told(model: Net, side: object) -> None:
    export(model, batch())
    index = Path("out/export.json")
    index.write_text(json.dumps({**json.loads(index.read_text()), "resized_shorter_side": side}))
    with pytest.raises(InputError, match="was edited: no image is resized to"):
        load_export(Path("out"))
