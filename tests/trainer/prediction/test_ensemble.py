"""Several runs that answer as one: `--with` of predict, evaluate and export, `load` of a list."""

import contextlib
import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from flambeau import InputError, evaluate, export, load, train
from flambeau.exports import step_figures
from flambeau.trainer.prediction.ensemble import JointLoader
from flambeau.trainer.tasks.classification import Classification
from flambeau.trainer.tasks.multilabel import Multilabel
from flambeau.trainer.tasks.regression import Regression
from flambeau.trainer.tasks.segmentation import Segmentation
from refused import refused

Flambeau = Callable[..., Any]
NET = """
from torch import nn

def linear(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))

def convolution(num_classes, channels):
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, num_classes),
    )

def pixels(num_classes, channels):
    return nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, num_classes, 1))
"""
COMMON: dict[str, Any] = {"bar": False, "precision": "fp32", "batch_size": 8, "epochs": 2}


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """Photos of two classes with numbers and masks, and runs on them."""
    root = tmp_path_factory.mktemp("ensemble")
    (root / "net.py").write_text(NET)
    draw = np.random.default_rng(0)
    rows = [("path", "weight")]
    for folder in ("photos/day", "photos/night", "shapes/images", "shapes/masks"):
        (root / folder).mkdir(parents=True)
    for k in range(40):
        name = ("day", "night")[k % 2]
        pixels = draw.integers(0, 150, (20 + k % 7, 30 - k % 5, 3)) + 60 * (k % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(root / f"photos/{name}/{k:02}.png")
        rows.append((f"photos/{name}/{k:02}.png", str(50 + 3 * k % 20 + 40 * (k % 2))))
        mask = (np.mgrid[:20, :24][k % 2] > 9).astype(np.uint8)
        Image.fromarray((200 * mask + draw.integers(0, 50, mask.shape)).astype(np.uint8)).save(
            root / f"shapes/images/{k}.png"
        )
        Image.fromarray(mask).save(root / f"shapes/masks/{k}.png")
    (root / "shapes" / "classes.txt").write_text("left\nright")
    with (root / "numbers.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    with (root / "others.csv").open("w", newline="") as file:  # of another mean and deviation
        csv.writer(file).writerows(rows[:24])
    numbers = {"target": "weight", "task": "regression", "model": "net.py:linear"}
    shapes = {"data": "shapes", "model": "net.py:pixels"}
    made: dict[str, dict[str, Any]] = {
        "small": {"data": "photos", "model": "net.py:linear", "image_size": 8},
        "large": {"data": "photos", "model": "net.py:convolution", "image_size": 16, "seed": 1},
        "twin": {"data": "photos", "model": "net.py:linear", "image_size": 16, "seed": 2},
        "weight": {"data": "numbers.csv", "image_size": 8, **numbers},
        "other_weight": {"data": "others.csv", "image_size": 8, **numbers},
        "mask": {"image_size": 16, **shapes},
        "large_mask": {"image_size": 24, "seed": 1, **shapes},
    }
    with kept_process(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, settings in made.items():
            train(out=name, **{**COMMON, **settings})
    return root


@pytest.fixture(autouse=True)
def _in_the_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr(step_figures, "_ROUNDS", range(1, 2))


FILES = [f"photos/{name}/{k:02}.png" for k, name in enumerate(("day", "night", "day", "night"))]


def test_probabilities_are_the_mean_of_those_of_the_runs(flambeau: Flambeau) -> None:
    alone = [load(run)(FILES).probabilities.double() for run in ("small", "large")]
    expected = sum(alone) / 2
    both = load(["small", "large"])
    torch.testing.assert_close(both(FILES).probabilities.double(), expected, rtol=1e-6, atol=1e-7)
    assert both(FILES[0]).classes == both(FILES).classes[:1]
    assert "linear, 2 classes, 8 x 8" in repr(both) and "convolution, 2 classes, 16 x 16" in repr(
        both
    )
    answer = flambeau("predict small --with large --json", *FILES)
    assert answer.code == 0, answer.err
    rows = [json.loads(line) for line in answer.out.splitlines()]
    found = [{one["class"]: one["probability"] for one in row["classes"]} for row in rows]
    for row, (day, night) in zip(found, expected.tolist(), strict=True):
        assert row == pytest.approx({"day": day, "night": night}, abs=2e-6)


def test_an_evaluation_has_the_figures_of_each_run(flambeau: Flambeau) -> None:
    answer = flambeau("evaluate small --with large --with twin photos --all --json")
    assert answer.code == 0, answer.err
    figures = json.loads(answer.out)
    for one, size in zip(figures["members"], (8, 16, 16), strict=True):
        alone = evaluate(one["run"], "photos", all_images=True)
        assert one["accuracy"] == alone.as_dict()["accuracy"]
        assert one["loss"] == pytest.approx(alone.loss, rel=1e-6)
        assert one["image_size"] == size
    assert [one["run"] for one in figures["members"]] == ["small", "large", "twin"]
    files = sorted(Path("photos").rglob("*.png"))
    labels = torch.tensor([int(file.parent.name == "night") for file in files])
    runs = ("small", "large", "twin")
    mean = sum(load(run)([*files]).probabilities.double() for run in runs) / 3
    assert figures["loss"] == pytest.approx(float(F.nll_loss(mean.log(), labels)), rel=1e-5)
    shown = flambeau("evaluate small --with large photos").out
    assert "small alone" in shown and "large alone" in shown and "(16 x 16)" in shown
    assert "members" not in json.loads(flambeau("evaluate small photos --json").out)


def test_numbers_are_averaged_in_their_unit() -> None:
    runs = ["weight", "other_weight"]
    facts = [json.loads(Path(run, "dataset.json").read_text()) for run in runs]
    assert facts[0]["target_std"] != facts[1]["target_std"]
    expected = (load(runs[0])(FILES).values + load(runs[1])(FILES).values) / 2
    torch.testing.assert_close(load(runs)(FILES).values, expected)
    [first, second] = evaluate(runs, "numbers.csv", all_images=True).as_dict()["members"]
    alone = evaluate("weight", "numbers.csv", all_images=True).as_dict()["columns"][0]
    assert (first["mae_weight"], first["rmse_weight"]) == (alone["mae"], alone["rmse"])
    assert "loss" not in second


def test_masks_are_of_the_mean_probabilities_at_the_larger_size() -> None:
    files = [f"shapes/images/{k}.png" for k in range(3)]
    small, large = load("mask"), load("large_mask")
    with torch.inference_mode():
        first, second = (one.model(one.preprocess(files)) for one in (small, large))
    first = F.interpolate(first, (24, 24), mode="bilinear", align_corners=False)
    mean = (first.softmax(1) + second.softmax(1)) / 2
    full = F.interpolate(mean.log(), (20, 24), mode="bilinear", align_corners=False)
    found = load(["mask", "large_mask"])(files).masks
    same = np.stack(found) == full.argmax(1).numpy()
    assert same.mean() > 0.999  # a pixel at which both classes are as probable may be either
    evaluation = evaluate(["mask", "large_mask"], "shapes", all_images=True).as_dict()
    assert evaluation["image_size"] == 24
    for one in evaluation["members"]:
        alone = evaluate(one["run"], "shapes", all_images=True).as_dict()
        assert (one["miou"], one["loss"]) == pytest.approx((alone["miou"], alone["loss"]), rel=1e-6)


def outputs_of(*shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [3 * torch.randn(shape, generator=generator) for _ in range(3)]


def test_the_mean_of_models_is_that_of_their_probabilities() -> None:
    logits = outputs_of(5, 4)
    classes = Classification(("a", "b", "c", "d"))
    expected = torch.stack([one.double().softmax(1) for one in logits]).mean(0)
    torch.testing.assert_close(classes.mean_of_models(logits).softmax(1), expected.float())
    labels = Multilabel(("a", "b", "c", "d"))
    expected = torch.stack([one.double().sigmoid() for one in logits]).mean(0)
    torch.testing.assert_close(labels.mean_of_models(logits).sigmoid(), expected.float())
    numbers = Regression(("a",) * 4, mean=(0.0,) * 4, std=(1.0,) * 4)
    torch.testing.assert_close(numbers.mean_of_models(logits), torch.stack(logits).mean(0))
    masks = outputs_of(2, 3, 6, 6)
    expected = torch.stack([one.double().softmax(1) for one in masks]).mean(0)
    task = Segmentation(("a", "b", "c"), (0, 1, 2))
    torch.testing.assert_close(task.mean_of_models(masks).softmax(1), expected.float())


def test_an_image_that_cannot_be_read_is_left_out_of_all(
    root: Path, tmp_path: Path, flambeau: Flambeau
) -> None:
    for name in ("day", "night"):
        (tmp_path / "some" / name).mkdir(parents=True)
    for file in FILES:
        Path(tmp_path / "some" / file.split("/", 1)[1]).write_bytes(Path(file).read_bytes())
    bad = tmp_path / "some" / "day" / "02.png"
    bad.write_bytes(bad.read_bytes()[:40])
    answer = flambeau("predict small --with large --skip-bad-images 1", tmp_path / "some")
    assert answer.code == 0 and answer.err.count("left out") == 1, answer
    assert [Path(line.split(":")[0]).name for line in answer.out.splitlines()] == [
        "00.png",
        "01.png",
        "03.png",
    ]
    refused(flambeau("predict small --with large", tmp_path / "some"), "02.png")


def test_what_one_loader_cannot_read_is_dropped_from_the_other() -> None:
    class Stream:
        length = 3

        def __init__(self, values: list[float], bad: list[int]) -> None:
            self.values, self.bad = values, bad

        def stream(self, **_: int) -> Any:
            from flambeau.data.loading.micro_batch import MicroBatch

            x = torch.tensor(self.values)
            rest = (len(x), 3, 0, True, True, 3, self.bad, True, 0)
            yield MicroBatch((x, x.long()), np.arange(3), *rest)

    streams: Any = [Stream([0, 1, 2], []), Stream([0, 2], [1])]
    [batch] = JointLoader(streams).stream(epoch=0, position=0, epochs=1)
    images, targets = batch.data
    assert [one.tolist() for one in (*images, *targets)] == [[0, 2]] * 4
    assert list(batch.bad) == [1]


@pytest.mark.parametrize("form", ["torch-export", "onnx"])
def test_an_export_of_several_is_one_graph_of_the_same_answers(
    form: str, tmp_path: Path, flambeau: Flambeau
) -> None:
    fold = "--quantize fp16" if form == "onnx" else ""
    answer = flambeau(
        f"export large --with twin --format {form} --allow-slower {fold} --json --out",
        tmp_path / "one",
    )
    assert answer.code == 0, answer.err
    steps = json.loads(answer.out)["steps"]
    assert steps[0]["step"] == "ensemble" and all(one["agreement"] == 1 for one in steps)
    expected = load(["large", "twin"])(FILES).probabilities
    shown = flambeau("predict", tmp_path / "one", "--json", *FILES)
    for line, (day, night) in zip(shown.out.splitlines(), expected.tolist(), strict=True):
        found = {one["class"]: one["probability"] for one in json.loads(line)["classes"]}
        assert found == pytest.approx({"day": day, "night": night}, abs=1e-3 if fold else 1e-5)
    assert flambeau("verify", tmp_path / "one").code == 0
    about = json.loads((tmp_path / "one" / "export.json").read_text())
    assert [one["settings"]["model"] for one in about["members"]] == [
        "net.py:convolution",
        "net.py:linear",
    ]
    figures = json.loads(flambeau("evaluate", tmp_path / "one", "photos --json").out)
    assert figures["trained_on"] == 36  # of the export, too, it is known


def test_numbers_of_several_are_one_graph(tmp_path: Path) -> None:
    both = load(["weight", "other_weight"])
    export(both, "numbers.csv", tmp_path / "one", allow_slower=True, say=lambda _: None)
    found = load_export(tmp_path / "one")(FILES).values
    torch.testing.assert_close(found, both(FILES).values, rtol=1e-5, atol=1e-4)


def load_export(path: Path) -> Any:
    from flambeau.exports.load_export import load_model
    from flambeau.trainer.prediction.predictor import Predictor

    return Predictor(load_model(path, say=lambda _: None))


def test_what_does_not_belong_together_is_refused(
    root: Path, tmp_path: Path, flambeau: Flambeau
) -> None:
    one = FILES[0]
    refused(flambeau("predict small", one, "--with small"), "small is named twice")
    refused(
        flambeau("predict small", one, "--with weight"), "weight", "regression", "classification"
    )
    refused(flambeau("predict small", one, "--with nowhere"), "nowhere does not exist")
    facts = Path("twin/dataset.json").read_text()
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.toml", "model.safetensors", "result.json"):
        (copy / name).write_bytes(Path("twin", name).read_bytes())
    (copy / "dataset.json").write_text(facts.replace('"night"', '"dusk"'))
    refused(flambeau("evaluate small photos --trust --with", copy), "output 1 is 'dusk'", "'night'")
    refused(
        flambeau("export small --with large --out", tmp_path / "e"),
        "16 x 16",
        "8 x 8",
        "--image-size",
    )
    refused(flambeau("export large --with twin --prune 0.5 --out", tmp_path / "e"), "--prune")
    refused(
        flambeau("export large --with twin --format safetensors --out", tmp_path / "e"),
        "--format safetensors",
    )
    assert not (tmp_path / "e").exists()
    with pytest.raises(InputError, match="at least two runs"):
        load(["small"])
