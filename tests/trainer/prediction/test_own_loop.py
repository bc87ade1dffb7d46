"""What a Run has made is used: loaded, predicted with, evaluated; and what its builder must be like."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import flambeau as doors
from flambeau.errors import InputError
from flambeau.parallel.ranks import FailedElsewhere
from flambeau.provenance import UntrustedCode
from flambeau.run.run import Run

NET = """
import os, pathlib
if os.environ.get("CANARY"):
    pathlib.Path(os.environ["CANARY"]).touch()
import torch
from torch import nn

def build(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, num_classes),
    )

def narrow(num_classes):
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(32, num_classes))

def small(num_classes):
    model = build(num_classes)
    model[0] = nn.Conv2d(3, 8, 5)
    return model

def more(num_classes):
    model = build(num_classes)
    model.append(nn.BatchNorm1d(num_classes))
    return model

def draws(num_classes):
    torch.rand(5)
    return build(num_classes)

def fails(num_classes):
    raise RuntimeError("no weights here")

def asks(num_classes, width):
    return build(num_classes)

def returns_none():
    return None

class Odd(nn.Sequential):
    def forward(self, x):
        if x.shape[-1] != 24:
            raise ValueError("24 pixels, please")
        return super().forward(x)

def odd(num_classes):
    return Odd(*build(num_classes))

class Noted(nn.Sequential):
    def get_extra_state(self):
        return {"a": 1}
    def set_extra_state(self, state):
        pass

def noted(num_classes):
    return Noted(*build(num_classes))
"""
TRANSFORM = transforms.Compose(
    [
        transforms.Resize(27),
        transforms.CenterCrop(24),
        transforms.ToTensor(),
        transforms.Normalize([0.4, 0.5, 0.6], [0.2, 0.25, 0.3]),
    ]
)
USE: dict[str, Any] = {
    "builder": "net.py:build",
    "preprocess": TRANSFORM,
    "classes": ["day", "dusk", "night"],
}


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test, with images of 24 x 24 and no records of runs, and a file of models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("net.py").write_text(NET)
    draw = np.random.default_rng(1)
    for label, name in enumerate(USE["classes"]):
        Path("photos", name).mkdir(parents=True)
        for number in range(5):
            pixels = draw.integers(70 * label, 70 * label + 90, (24, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"photos/{name}/{number}.png")
    return tmp_path / "photos"


def build(name: str = "build") -> nn.Module:
    names: dict[str, Any] = {}
    exec(NET, names)
    torch.manual_seed(3)
    model: nn.Module = names[name](3)
    return model


def train(
    folder: str | Path = "run",
    *,
    model: nn.Module | None = None,
    stop_at: int | None = None,
    **options: Any,
) -> Run:
    """A user's loop."""
    model = build() if model is None else model
    data = ImageFolder("photos", TRANSFORM)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"duration": "2ep", "batch_size": 4, "bar": False, **options}
    run = Run(folder, model, optimizer, data, **options)
    for _ in run.epochs():
        for images, targets in run.batches():
            run.step(cross_entropy(model(images), targets))
            if run.state.step == stop_at:
                raise KeyError("stopped")
        for images, targets in run.evaluate(data):
            run.log(val_accuracy=model(images).argmax(1) == targets)
    return run


def loaders_batch() -> tuple[Tensor, Tensor]:
    """All images as the user's own loader gives them."""
    images, targets = next(iter(DataLoader(ImageFolder("photos", TRANSFORM), batch_size=99)))
    return images, targets


def expected_logits(folder: str = "run") -> Tensor:
    """Those of the model in the user's own code, with the published weights and the user's own loader."""
    model = build().eval()
    model.load_state_dict(load_file(Path(folder, "model.safetensors")))
    with torch.no_grad():
        logits: Tensor = model(prepared(loaders_batch()[0]))
    return logits


def prepared(images: Tensor) -> Tensor:
    """Images of the size of the model are not resized: the loader's without its resizing."""
    plain = transforms.Compose(TRANSFORM.transforms[2:])
    files = [path for path, _ in ImageFolder("photos").samples]
    assert len(files) == len(images)
    return torch.stack([plain(Image.open(path)) for path in files])


def files() -> list[str]:
    return [path for path, _ in ImageFolder("photos").samples]


@pytest.mark.usefixtures("photos")
def test_predictions_are_the_models_to_the_bit() -> None:
    train(**USE)
    predictor = doors.load("run")
    assert torch.equal(predictor(files()).logits, expected_logits())
    assert torch.equal(predictor.preprocess(files()), prepared(loaders_batch()[0]))
    assert predictor.classes == ("day", "dusk", "night")
    assert predictor.image_size == 24


@pytest.mark.usefixtures("photos")
def test_images_of_another_size_are_resized_as_the_transform_does() -> None:
    train(**USE)
    coarse = np.random.default_rng(2).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((90, 60), Image.Resampling.BICUBIC)
    ours = doors.load("run").preprocess(image)[0]
    assert (ours - TRANSFORM(image)).abs().max() < 1.5 / 255 / 0.2


@pytest.mark.usefixtures("photos")
def test_evaluate_predict_and_features(flambeau: Any) -> None:
    train(**USE)
    evaluation = doors.evaluate("run", "photos")
    logits, targets = expected_logits(), loaders_batch()[1]
    assert evaluation.accuracy == (logits.argmax(1) == targets).double().mean()
    assert evaluation.loss == pytest.approx(float(cross_entropy(logits, targets)), rel=1e-6)

    answer = flambeau("evaluate run photos --json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["images"] == 15
    assert "which images this model was trained on is not known: all 15 of photos" in answer.err

    answer = flambeau("predict run photos/night --json --top 1")
    assert answer.code == 0, answer.err
    rows = [json.loads(line) for line in answer.out.splitlines()]
    names = [USE["classes"][k] for k in logits.argmax(1).tolist()]
    assert [row["classes"][0]["class"] for row in rows] == names[10:]

    answer = flambeau("features run photos out.npy --layers 4")
    assert answer.code == 0, answer.err
    model = build().eval()
    model.load_state_dict(load_file("run/model.safetensors"))
    with torch.no_grad():
        expected = model[:5](prepared(loaders_batch()[0]))  # type: ignore[index]
    assert torch.equal(torch.from_numpy(np.load("out.npy")), expected)

    assert "Conv2d" in flambeau("inspect run").out
    assert flambeau("verify run").code == 0
    assert "net.py:build" in flambeau("runs . --json").out
    answer = flambeau("check photos --model run")
    assert "what run was trained on is not known" in answer.err
    assert flambeau("predict run --image-size 32 photos/day/0.png").code == 0


@pytest.mark.usefixtures("photos")
def test_settings_of_a_command_of_ones_own_may_name_a_model() -> None:
    train(settings={"model": "mine", "width": 8}, **USE)
    assert torch.equal(doors.load("run")(files()).logits, expected_logits())


@pytest.mark.usefixtures("photos")
def test_it_can_be_a_teacher(flambeau: Any) -> None:
    train(**USE)
    answer = flambeau(
        "train photos --teacher run --image-size 24 --duration 2st --batch-size 4 --out pupil"
    )
    assert answer.code == 0, answer.err


@pytest.mark.usefixtures("photos")
def test_averaged_weights_and_those_of_an_unfinished_run() -> None:
    train("averaged", ema=0.5, **USE)
    assert torch.equal(doors.load("averaged")(files()).logits, expected_logits("averaged"))

    with pytest.raises(KeyError):
        train("stopped", stop_at=3, checkpoint_every="2st", **USE)
    with pytest.warns(UserWarning, match="not finished: these are the weights of step-00000002"):
        predictor = doors.load("stopped")
    model = build().eval()
    model.load_state_dict(load_file("stopped/checkpoints/step-00000002/model.safetensors"))
    with torch.no_grad():
        assert torch.equal(predictor(files()).logits, model(prepared(loaders_batch()[0])))


@pytest.mark.usefixtures("photos")
def test_a_finished_run_notes_it_and_trains_no_further(flambeau: Any) -> None:
    train()
    weights = Path("run/model.safetensors").read_bytes()
    metrics = Path("run/metrics.jsonl").read_bytes()
    answer = flambeau("predict run photos")
    assert answer.code == 2
    assert "does not say how its model is made" in answer.err
    assert 'Give Run builder="FILE.py:FUNCTION", preprocess= and classes= and start' in answer.err

    train(**USE, keep=5)
    assert Path("run/model.safetensors").read_bytes() == weights
    assert Path("run/metrics.jsonl").read_bytes() == metrics
    assert "keep = 2" in Path("run/config.toml").read_text()  # only what was asked for
    assert torch.equal(doors.load("run")(files()).logits, expected_logits())

    train()  # says nothing of it, and takes nothing away
    assert torch.equal(doors.load("run")(files()).logits, expected_logits())
    other = {**USE, "classes": ["a", "b", "c"]}
    train(**other)
    assert doors.load("run").classes == ("a", "b", "c")


@pytest.mark.usefixtures("photos")
def test_a_resumed_run_has_the_same_weights_and_the_newest_note() -> None:
    whole = build()
    train("whole", model=whole)
    with pytest.raises(KeyError):
        train(stop_at=5, checkpoint_every="2st")
    resumed = build()
    train(model=resumed, checkpoint_every="2st", **{**USE, "builder": "net.py:draws"})
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name])
    assert torch.equal(doors.load("run")(files()).logits, expected_logits())


@pytest.mark.usefixtures("photos")
def test_generators_are_as_without_a_builder() -> None:
    states = []
    for options in ({}, {**USE, "builder": "net.py:draws"}):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = ImageFolder("photos", TRANSFORM)
        run = Run(f"run{len(states)}", model, optimizer, data, duration="1ep", **options)
        states.append(torch.get_rng_state())
        run.close()
    assert torch.equal(*states)


@pytest.mark.usefixtures("photos")
def test_runs_in_parts_and_in_memory_format_of_their_own() -> None:
    model = build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    train(model=model, parts=2, **USE)
    assert torch.equal(doors.load("run")(files()).logits, expected_logits())


@pytest.mark.usefixtures("photos")
def test_a_run_on_several_ranks(start_ranks: Callable[..., Any]) -> None:
    def work() -> int:
        return train(**USE).state.step

    assert start_ranks(2, work, group=True).results() == [8, 8]
    assert torch.equal(doors.load("run")(files()).logits, expected_logits())

    def wrong() -> str:
        with pytest.raises((InputError, FailedElsewhere)) as told:
            train("other", **{**USE, "builder": "net.py:narrow"})
        return str(told.value)

    answers = start_ranks(2, wrong, group=True).results()
    assert "makes another model than this run trains" in answers[0]
    assert not Path("other").exists()


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"builder": "net.py"}, "net.py' is not FILE.py:FUNCTION"),
        ({"builder": "gone.py:build"}, "gone.py is not a file"),
        ({"builder": "net.py:bild"}, "has no function 'bild'"),
        ({"builder": "net.py:narrow"}, "another model than this run trains: it has no '1.weight'"),
        ({"builder": "net.py:small"}, r"'0.weight' is \(8, 3, 5, 5\), and \(8, 3, 3, 3\) in the"),
        ({"builder": "net.py:more"}, "its '7.weight' is not in the model of this run"),
        ({"builder": "net.py:fails"}, "net.py, line .*RuntimeError: no weights here"),
        ({"builder": "net.py:asks"}, "asks for 'width'; it is called with any of num_classes, ch"),
        ({"builder": "net.py:returns_none"}, "must return a torch.nn.Module"),
        ({"builder": None}, "belong together: .*give builder, too"),
        ({"preprocess": None, "classes": None}, "give preprocess and classes, too"),
        ({"classes": ["a", "b"]}, r"is \(3, 32\)|'6.weight' is \(2, 32\), and \(3, 32\)"),
        ({"classes": ["a", "b", "a"]}, "classes has 'a' twice"),
        ({"classes": "abc"}, "classes must be a list of names"),
        ({"classes": [1, 2, 3]}, "classes must be names"),
        ({"preprocess": 5}, "preprocess must be a dict, or a transform"),
        ({"preprocess": {"image_size": 24}}, "preprocess says no mean"),
        ({"preprocess": transforms.ToTensor()}, "this transform cannot be recorded"),
    ],
)
def test_what_does_not_fit_is_told_at_once(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        train(**{**USE, **changes})
    assert not Path("run").exists()


@pytest.mark.usefixtures("photos")
def test_the_model_is_tried_on_the_size_that_was_given() -> None:
    train(model=build("odd"), **{**USE, "builder": "net.py:odd"})
    preprocess = {"image_size": 32, "mean": [0.5] * 3, "std": [0.5] * 3}
    use = {**USE, "builder": "net.py:odd", "preprocess": preprocess}
    with pytest.raises(InputError, match="1 x 3 x 32 x 32, which preprocess says: ValueError: 24"):
        train("other", model=build("odd"), **use)


@pytest.mark.usefixtures("photos")
def test_state_that_the_weights_lack_is_refused() -> None:
    with pytest.raises(InputError, match="'_extra_state' is not a tensor"):
        train(model=build("noted"), **{**USE, "builder": "net.py:noted"})


LOOP = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from flambeau import Run

def build(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, num_classes))

def main():
    model = build(2)
    data = TensorDataset(torch.rand(8, 3, 8, 8), torch.arange(8) % 2)
    preprocess = {"image_size": 8, "mean": [0.5] * 3, "std": [0.5] * 3}
    run = Run("run", model, torch.optim.SGD(model.parameters(), lr=0.1), data, duration="1ep",
              builder=f"{__file__}:build", preprocess=preprocess, classes=["a", "b"], bar=False)
    for _ in run.epochs():
        for images, targets in run.batches():
            run.step(nn.functional.cross_entropy(model(images), targets))
"""


def test_the_builder_may_be_in_the_script_itself(
    photos: Path, flambeau: Any, run_python: Any
) -> None:
    Path("loop.py").write_text(f'{LOOP}\nif __name__ == "__main__":\n    main()\n')
    done = run_python("loop.py")
    assert done.returncode == 0, done.stderr
    answer = flambeau("predict run", photos / "day" / "0.png")
    assert answer.code == 0, answer.err

    shutil.rmtree("run")
    Path("loop.py").write_text(f"{LOOP}\nmain()\n")  # trains wherever it is imported
    done = run_python("loop.py")
    assert done.returncode != 0
    assert "trains when it is imported" in done.stderr
    assert 'below `if __name__ == "__main__":`' in done.stderr
    assert not Path("run").exists()


@pytest.mark.usefixtures("photos")
def test_a_changed_file_is_told_and_a_model_that_no_longer_fits(flambeau: Any) -> None:
    train(**USE)
    Path("net.py").write_text(NET + "\n# one line more\n")
    with pytest.warns(UserWarning, match=r"net\.py has changed since the run was started"):
        doors.load("run")
    Path("net.py").write_text(NET.replace("Conv2d(3, 8, 3, stride=2)", "Conv2d(3, 8, 5)"))
    answer = flambeau("predict run photos")
    assert answer.code == 2
    assert "the weights in run do not fit the model" in answer.err
    assert "'0.weight' is (8, 3, 3, 3), the model's (8, 3, 5, 5)" in answer.err
    Path("net.py").unlink()
    answer = flambeau("predict run photos")
    assert answer.code == 2
    assert "net.py is not a file" in answer.err


def edited(**changes: object) -> None:
    import tomllib

    import tomli_w  # what run folders are written with

    config = tomllib.loads(Path("run/config.toml").read_text())
    Path("run/config.toml").write_bytes(tomli_w.dumps({**config, **changes}).encode())


@pytest.mark.usefixtures("photos")
@pytest.mark.parametrize(
    "changes",
    [
        {"builder": "resnet18"},
        {"builder": 5},
        {"preprocess": 5},
        {"preprocess": {"image_size": 10**9, "mean": [0.5], "std": [0.5]}},
        {"classes": []},
        {"classes": "abc"},
        {"classes": ["\x1b[2J", "b", "c"]},
    ],
)
def test_an_edited_note_is_told(flambeau: Any, changes: dict[str, Any]) -> None:
    train(**USE)
    edited(**changes)
    answer = flambeau("predict run photos --trust")
    assert answer.code == 2
    assert "config.toml was edited" in answer.err
    assert "\x1b" not in answer.err


COMMANDS = (
    "predict run photos", "evaluate run photos", "features run photos out.npy", "inspect run",
    "check photos --model run", "export run --out made --data photos", "doctor run --no-trials",
    "train photos --teacher run --image-size 24 --duration 1st --out new",
)  # fmt: skip


@pytest.mark.usefixtures("photos")
def test_a_builder_of_a_foreign_run_is_not_run(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train(**USE)
    shutil.move("state", "other_state")
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    for command in COMMANDS:
        answer = flambeau(command)
        assert not Path("canary").exists(), command
        assert answer.code == 2, (command, answer)
        if not command.startswith("doctor"):
            assert "net.py:build" in answer.err
            assert answer.err.rstrip().endswith(f"flambeau {command} --trust"), answer.err
    with pytest.raises(UntrustedCode, match=r"net\.py:build"):
        doors.load("run")
    assert flambeau("verify run").code == 0
    assert flambeau("report run").code == 0
    assert not Path("canary").exists()

    answer = flambeau("predict run photos --trust")
    assert answer.code == 0
    assert "net.py:build, which run names (trusted)" in answer.err
    assert Path("canary").exists()


@pytest.mark.usefixtures("photos")
def test_a_script_that_names_no_builder_makes_a_foreign_one_no_own(
    flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder from elsewhere is continued by a script of this user, which says nothing of its builder."""
    with pytest.raises(KeyError):
        train(stop_at=2, checkpoint_every="1st", **USE)
    shutil.move("state", "other_state")
    train(checkpoint_every="1st")
    answer = flambeau("predict run photos")
    assert answer.code == 2
    assert "running" not in answer.err


@pytest.mark.usefixtures("photos")
def test_a_moved_folder_is_still_ones_own() -> None:
    train(**USE)
    shutil.move("run", "moved")
    assert torch.equal(doors.load("moved")(files()).logits, expected_logits("moved"))
