"""Several labels per image, and numbers: from a table of files to figures, predictions and a report."""

import contextlib
import csv
import json
import math
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import average_precision_score
from torch import Tensor

from flambeau import evaluate, load, train
from flambeau.cli.command import main
from flambeau.errors import InputError
from flambeau.recipes.memory.memory_budget import fake_tensor_mode
from flambeau.trainer import loss as loss_module
from flambeau.trainer.tasks.multilabel import Multilabel, asymmetric_losses
from flambeau.trainer.tasks.regression import Regression
from flambeau.trainer.tasks.task import Task
from flambeau.trainer.tasks.whole_image import constants

NUM = 96
SETTINGS = {"epochs": 4, "batch_size": 16, "lr": 0.05, "seed": 1, "bar": False}
Flambeau = Callable[..., Any]


def write_photos(folder: Path) -> None:
    """Images whose left and right halves are bright or dark, with tables of what is in them."""
    draw = np.random.default_rng(0)
    rows = []
    for k in range(NUM):
        left, right = draw.integers(0, 2, 2)
        pixels = draw.integers(0, 60, (16, 16)) + 150 * np.repeat([left, right], 8)
        name = f"{k:03}.png"
        Image.fromarray(pixels.astype(np.uint8)).save(folder / name)
        labels = "|".join(word for word, on in (("left", left), ("right", right)) if on)
        unknown = "" if k % 5 == 0 else str(right)
        rows.append((name, labels, left, unknown, 100 + 10 * left + 20 * right, f"{k}.5"))
    for name, head, columns in (
        ("cells.csv", ["path", "labels"], (0, 1)),
        ("columns.csv", ["path", "left", "right"], (0, 2, 3)),
        ("numbers.csv", ["path", "weight", "id"], (0, 4, 5)),
    ):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([head, *([row[at] for at in columns] for row in rows)])


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the test, with the images and the tables."""
    write_photos(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


TASKS: dict[str, dict[str, Any]] = {
    "cells": {"data": "cells.csv"},
    "columns": {"data": "columns.csv"},
    "numbers": {"data": "numbers.csv", "target": "weight", "task": "regression", "lr": 0.01},
}
Trained = Callable[..., None]


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """A finished run of each task, by its name."""
    folder = tmp_path_factory.mktemp("tasks")
    write_photos(folder)
    with kept_process(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, settings in TASKS.items():
            train(out=name, **{**SETTINGS, **settings})
    return folder


@pytest.fixture
def trained(runs: Path, photos: Path) -> Trained:
    """`trained("cells", "run")`: a copy of the run of a task in the folder of the test."""

    def copied(name: str, out: str = "run") -> None:
        shutil.copytree(runs / name, photos / out)

    return copied


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_learned_measured_and_shown(
    trained: Trained, name: str, flambeau: Flambeau
) -> None:
    if name == "numbers":
        metrics = train(out="run", **{**SETTINGS, **TASKS[name], "epochs": 8}).metrics
    else:
        trained(name)
        metrics = json.loads(Path("run/result.json").read_text())["metrics"]
    evaluation = evaluate("run", TASKS[name]["data"])
    figures = evaluation.as_dict()
    if name == "numbers":
        [column] = figures["columns"]
        assert column["r2"] > 0.8 and column["mae"] < 5
        assert metrics["val_mae"] == pytest.approx(column["mae"], rel=1e-5)
    else:
        assert figures["map"] > 0.95
        assert metrics["val_map"] == pytest.approx(figures["map"], rel=1e-6)
        predictions: Any = evaluation.predictions
        known = predictions.labels[:, 1].isfinite()
        expected = average_precision_score(
            predictions.labels[known, 1], predictions.probabilities[known, 1]
        )
        assert figures["labels"][1]["average_precision"] == pytest.approx(expected)
    assert metrics["val_loss"] == pytest.approx(figures["loss"], rel=1e-5)
    assert "nan" not in flambeau("evaluate", "run", TASKS[name]["data"], "--all").out
    page = Path("run/report.html").read_text()
    assert "data:image/" in page
    assert ("Labels" if name != "numbers" else "mean abs. error") in page
    assert flambeau("verify", "run").code == 0
    assert flambeau("report", "run", "--out", "page.html").code == 0


@pytest.mark.parametrize("name", TASKS)
def test_predictions_by_all_ways_are_the_same(
    trained: Trained, name: str, flambeau: Flambeau
) -> None:
    trained(name)
    files = [f"{k:03}.png" for k in range(5)]
    answers = [*load("run")(files)]
    printed = [
        json.loads(line) for line in flambeau("predict", "run", *files, "--json").out.splitlines()
    ]
    assert [answer.as_dict() for answer in answers] == [
        {key: value for key, value in row.items() if key != "image"} for row in printed
    ]
    lines = flambeau("predict", "run", *files).out.splitlines()
    assert lines == [
        f"{file}: {answer.as_text()}" for file, answer in zip(files, answers, strict=True)
    ]
    assert flambeau("predict", "run", *files, "--out", "p.csv").code == 0
    with Path("p.csv").open() as file:
        head, *rows = csv.reader(file)
    assert [row[2:] for row in rows] == [answer.cells() for answer in answers]
    assert len(head) == len(rows[0])
    network = load("run")
    outputs = network.model(network.preprocess(files)).detach()
    task = network.trained.facts.task
    torch.testing.assert_close(
        torch.tensor(
            [[float(cell) for cell in answer.cells()[name != "numbers" :]] for answer in answers]
        ),
        task.decode(outputs),
        atol=0.02,  # bfloat16, where the machine has it
        rtol=1e-3,
    )
    evaluation = evaluate("run", TASKS[name]["data"], all_images=True)
    evaluation.save_predictions("all.csv")
    assert len(Path("all.csv").read_text().splitlines()) == NUM + 1


def test_thresholds_are_those_of_the_published_weights(trained: Trained) -> None:
    trained("cells")
    stored = json.loads(Path("run/evaluation.json").read_text())
    found = load("run")
    assert found("000.png").thresholds.tolist() == pytest.approx(stored["thresholds"])
    assert stored["step"] == json.loads(Path("run/result.json").read_text())["step"]
    Path("run/evaluation.json").write_text(json.dumps({**stored, "thresholds": [2, "x"]}))
    assert load("run")("000.png").thresholds.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("name", TASKS)
def test_a_killed_run_ends_with_the_same_bits(
    photos: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, **TASKS[name], "checkpoint_every": "3st"}
    train(out="whole", **settings)
    calls = []

    class Killed(BaseException):
        pass

    counted = loss_module.TrainingLoss.with_logits

    def dies(self: Any, *batch: Any, step: int) -> Any:
        calls.append(step)
        if step in (4, 11, 17) and calls.count(step) == 1:
            raise Killed
        return counted(self, *batch, step=step)

    monkeypatch.setattr(loss_module.TrainingLoss, "with_logits", dies)
    kills = 0
    while True:
        try:
            train(out="killed", **settings)
        except Killed:
            kills += 1
        else:
            break
    assert kills == 3
    for file in ("model.safetensors", "evaluation.json"):
        assert (photos / "whole" / file).read_bytes() == (photos / "killed" / file).read_bytes()
    lines = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines()]
    again = [json.loads(line) for line in Path("killed/metrics.jsonl").read_text().splitlines()]
    timed = {"images_per_s", "data_wait", "seconds"}
    assert [{k: v for k, v in one.items() if k not in timed} for one in lines] == [
        {k: v for k, v in one.items() if k not in timed} for one in again
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_parts_give_the_same_bits_on_one_to_three_ranks(
    photos: Path, name: str, start_ranks: Callable[..., Any]
) -> None:
    words = [
        "--parts",
        "6",
        "--batch-size",
        "12",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--workers",
        "0",
    ]
    words += [f"--{flag}={value}" for flag, value in TASKS[name].items() if flag != "data"]

    def work(folder: str) -> int:
        return main(["train", TASKS[name]["data"], "--out", folder, *words])

    for world in (1, 2, 3):
        assert start_ranks(world, work, f"run{world}").results() == [0] * world
    one, *others = (
        safetensors.torch.load_file(f"run{world}/model.safetensors") for world in (1, 2, 3)
    )
    for other in others:
        assert all(torch.equal(one[key], other[key]) for key in one)
    figures = [
        json.loads(Path(f"run{world}/result.json").read_text())["metrics"] for world in (1, 2, 3)
    ]
    assert figures[0] == figures[1] == figures[2]


# ---------------------------------------------------------------- losses


def made(num: int = 12, columns: int = 3) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(num, columns, generator=draw)
    return outputs, (torch.rand(num, columns, generator=draw) > 0.5).float()


def test_the_loss_of_labels_is_that_of_torch() -> None:
    outputs, targets = made()
    weight = torch.tensor([1.0, 2.0, 0.5])
    task = Multilabel(("a", "b", "c"))
    found = task.loss(outputs, targets, smoothing=0.2, weight=weight)
    expected = F.binary_cross_entropy_with_logits(outputs, targets * 0.8 + 0.1, pos_weight=weight)
    torch.testing.assert_close(found, expected)
    each = task.evaluation_figures(outputs, targets)["val_loss"]
    torch.testing.assert_close(
        each, F.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)
    )


def test_the_asymmetric_loss_is_that_of_the_paper() -> None:
    outputs, targets = made()
    found = asymmetric_losses(outputs, targets, None)
    for z, y, value in zip(outputs.flatten(), targets.flatten(), found.flatten(), strict=True):
        p = 1 / (1 + math.exp(-float(z)))
        p_m = max(p - 0.05, 0.0)
        expected = (1 - p) * math.log(p) if y == 1 else p_m**4 * math.log(1 - p_m)
        assert float(value) == pytest.approx(-expected, rel=1e-4)
    sure = torch.tensor([[-200.0, 200.0], [200.0, -200.0]], requires_grad=True)
    asymmetric_losses(sure, torch.tensor([[1.0, 0.0], [1.0, 0.0]]), None).sum().backward()
    assert sure.grad is not None and sure.grad.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "function"), [("mse", F.mse_loss), ("l1", F.l1_loss), ("huber", F.huber_loss)]
)
def test_the_loss_of_numbers_is_that_of_torch(kind: str, function: Any) -> None:
    outputs, targets = made(columns=2)
    targets = 100 + 7 * targets
    task = Regression(("a", "b"), mean=(100.0, 102.0), std=(2.0, 3.0), kind=kind)
    wanted = (targets - torch.tensor([100.0, 102.0])) / torch.tensor([2.0, 3.0])
    torch.testing.assert_close(
        task.loss(outputs, targets, smoothing=0.0, weight=None), function(outputs, wanted)
    )
    torch.testing.assert_close(task.decode(wanted), targets)


@pytest.mark.parametrize(
    "task",
    [
        Multilabel(("a", "b", "c"), known=(1.0, 0.5, 0.75)),
        Multilabel(("a", "b", "c"), known=(1.0, 0.5, 0.75), kind="asymmetric"),
        Regression(("a", "b", "c"), mean=(0.5,) * 3, std=(0.5,) * 3, known=(1.0, 0.5, 0.75)),
    ],
)
def test_unknown_targets_have_no_gradient_and_cuts_of_a_batch_no_effect(task: Task) -> None:
    outputs, targets = made()
    targets[::2, 1] = math.nan
    targets[::4, 2] = math.nan
    outputs.requires_grad_()
    task.loss(outputs, targets, smoothing=0.0, weight=None).backward()
    assert outputs.grad is not None
    assert (outputs.grad[targets.isnan()] == 0).all()
    assert (outputs.grad[targets.isfinite()] != 0).all()
    whole = outputs.grad.clone()
    outputs.grad = None
    for rows in (slice(0, 3), slice(3, 12)):
        share = (rows.stop - rows.start) / 12
        (share * task.loss(outputs[rows], targets[rows], smoothing=0.0, weight=None)).backward()
    torch.testing.assert_close(outputs.grad, whole)


def test_constants_of_a_loss_are_copied_to_the_device_once() -> None:
    task = Regression(("a",), mean=(3.25,), std=(2.5,))
    with torch.inference_mode():  # an evaluation may come first
        task.evaluation_figures(torch.zeros(1, 1), torch.ones(1, 1))
    outputs = torch.zeros(1, 1, requires_grad=True)
    task.loss(outputs, torch.ones(1, 1), smoothing=0.0, weight=None).backward()
    assert outputs.grad is not None and float(outputs.grad) == pytest.approx(2 * (3.25 - 1) / 2.5)
    cpu = torch.device("cpu")
    with fake_tensor_mode():  # an estimate of memory leaves nothing behind
        assert type(constants((7.0,), cpu)) is not Tensor
    assert type(constants((7.0,), cpu)) is Tensor
    assert constants((3.25,), cpu) is constants((3.25,), cpu)


def test_views_are_averaged_as_probabilities_or_numbers() -> None:
    outputs, _ = made()
    other = outputs.flip(1)
    labels = Multilabel(("a", "b", "c"))
    torch.testing.assert_close(
        labels.mean_of_views(outputs, other).sigmoid(), (outputs.sigmoid() + other.sigmoid()) / 2
    )
    numbers = Regression(("a", "b", "c"), mean=(0.0,) * 3, std=(1.0,) * 3)
    torch.testing.assert_close(numbers.mean_of_views(outputs, other), (outputs + other) / 2)


# ---------------------------------------------------------------- settings


@pytest.mark.slow
@pytest.mark.parametrize("name", ["columns", "numbers"])
@pytest.mark.parametrize("words", ["--compile", "--batch-size auto:16"])
def test_targets_of_noise_are_of_the_task(
    photos: Path, name: str, words: str, flambeau: Flambeau
) -> None:
    """What is compiled, or tried for its memory, before the first step."""
    given = [f"--{flag} {value}" for flag, value in TASKS[name].items() if flag != "data"]
    common = "--model tiny_convnet --epochs 1 --device cpu --out run"
    ran = flambeau("train", TASKS[name]["data"], common, words, *given)
    assert ran.code == 0, ran.err


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("cells", {"mixup": 0.2, "cutmix": 1.0, "ema": 0.9, "label_smoothing": 0.1}),
        ("columns", {"loss": "asymmetric", "class_weights": "auto", "accumulate": 2, "mixup": 0.2}),
        ("numbers", {"loss": "huber", "mixup": 0.2, "best": "val_r2", "optimizer": "adamw"}),
        ("numbers", {"loss": "l1", "best": "val_spearman", "early_stop": 1}),
        ("cells", {"best": "val_hamming_loss", "schedule": "plateau", "random_erasing": 0.5}),
    ],
)
def test_settings_that_work_with_a_task(photos: Path, name: str, settings: dict[str, Any]) -> None:
    given = {**SETTINGS, "epochs": 2, **TASKS[name], **settings}
    result = train(out="run", **given)
    assert all(value is not None for value in result.metrics.values())
    train(out="run", **given)  # finished: nothing is refused that was taken before


def test_a_teacher_of_the_same_task(trained: Trained) -> None:
    for name in ("cells", "numbers"):
        trained(name, f"teacher-{name}")
        train(out=f"student-{name}", teacher=f"teacher-{name}", **{**SETTINGS, **TASKS[name]})
    with pytest.raises(InputError, match="the teacher"):
        train(out="wrong", teacher="teacher-numbers", **{**SETTINGS, **TASKS["cells"]})


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cells", {"balance": "full"}, "balance has no place in a multilabel task"),
        ("numbers", {"balance": "sqrt"}, "balance has no place in a regression task"),
        ("numbers", {"cutmix": 1.0}, "cutmix has no place in a regression task"),
        ("numbers", {"label_smoothing": 0.1}, "label_smoothing has no place in a regression task"),
        ("numbers", {"class_weights": "auto"}, "class_weights has no place in a regression task"),
        (
            "numbers",
            {"loss": "bce"},
            "loss = 'bce' is not for a regression task: choose one of mse, l1",
        ),
        ("cells", {"best": "val_accuracy"}, "best = 'val_accuracy' is not for a multilabel task"),
        ("cells", {"task": "regression"}, "is no number"),
    ],
)
def test_settings_that_do_not(
    photos: Path, name: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        train(out="run", **{**SETTINGS, **TASKS[name], **settings})
    assert not Path("run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cells", "numbers"])
def test_an_export_answers_as_its_run(
    trained: Trained, name: str, flambeau: Flambeau, run_python: Any
) -> None:
    trained(name)
    answer = flambeau("export", "run", "--out", "exported", "--format", "torch-export", "--json")
    assert answer.code == 0, answer.err
    step = json.loads(answer.out)["steps"][-1]
    assert step["agreement"] == 1 and step["loss"] is not None
    files = ["000.png", "001.png", "002.png"]
    example = run_python("exported/example.py", *files)
    assert example.returncode == 0, example.stderr
    lines = flambeau("predict", "exported", *files, "--json").out.splitlines()
    for row, line in zip(map(json.loads, lines), example.stdout.splitlines(), strict=True):
        for what in row["labels"] if name == "cells" else row["values"]:
            value = row["probabilities"][what] if name == "cells" else row["values"][what]
            said = float(line.partition(f"{what} ")[2].partition(",")[0])
            assert said == pytest.approx(value, rel=1e-4)
    card = Path("exported/README.md").read_text()
    assert ("sigmoid of the logits" if name == "cells" else "in the unit of the data") in card
    evaluation = evaluate("run", TASKS[name]["data"]).as_dict()
    exported = json.loads(flambeau("evaluate", "exported", TASKS[name]["data"], "--json").out)
    assert exported["loss"] == pytest.approx(evaluation["loss"], rel=0.05)


def test_packing_says_which_formats_hold_one_class_per_image(
    photos: Path, flambeau: Flambeau
) -> None:
    answer = flambeau("pack", "cells.csv", "packed.npz")
    assert answer.code == 2
    assert "cells.csv has targets for multilabel, and npz here holds one class" in answer.err
    assert not Path("packed.npz").exists()


def test_check_looks_at_labels_and_numbers(photos: Path, flambeau: Flambeau) -> None:
    text = Path("numbers.csv").read_text().replace("003.png,", "003.png,9", 1)
    Path("typing.csv").write_text(text)
    Path("numbers.csv").unlink()
    rows = [line.split(",") for line in text.splitlines()[1:]]
    lines = [f"{image},{weight}.5" for image, weight, _ in rows]
    Path("weights.csv").write_text("\n".join(["path,label", *lines]) + "\n")
    found = flambeau("check", "weights.csv", "--json").out
    kinds = {one["kind"]: one for one in json.loads(found)["findings"]}
    assert "with a number far from all others" in kinds["labels"]["title"]
    assert "003.png" in json.dumps(kinds["labels"])
    rare = Path("cells.csv").read_text().replace("left|right", "left|right|rare", 1)
    Path("cells.csv").write_text(rare)
    found = flambeau("check", "cells.csv").out
    assert "rare: 1 to train on" in found
    assert flambeau("check", "cells.csv", "--out", "clean.csv").code in (0, 1)
    assert train(data="clean.csv", out="run", **{**SETTINGS, "epochs": 1}).metrics["val_map"]


def config_of(run: str) -> dict[str, Any]:
    return tomllib.loads(Path(run, "config.toml").read_text())


def test_numbers_are_learned_by_adamw_of_whole_images_unless_otherwise_asked(
    photos: Path, flambeau: Flambeau
) -> None:
    """The size of a thing is another one in a part of an image, and its direction in a mirror image."""
    common = ("--epochs", "1", "--batch-size", "16")
    numbers = ("numbers.csv", "--task", "regression", "--target", "weight", *common)
    said = flambeau("train", *numbers, "--out", "plain").err
    assert "whole images, as a mirror image or a part may have other numbers" in " ".join(
        said.split()
    )
    config = config_of("plain")
    assert (config["optimizer"], config["flip"], config["padding"]) == ("adamw", False, 0)
    said = flambeau("train", *numbers, "--out", "varied", "--flip", "--padding", "2").err
    assert "whole images" not in " ".join(said.split())
    config = config_of("varied")
    assert (config["flip"], config["padding"]) == (True, 2)
    assert flambeau("train", *numbers, "--out", "turns", "--alternate-flip").code == 0
    assert config_of("turns")["flip"] is True
    # A label is the same in a mirror image, and its thing may be in any part.
    assert flambeau("train", "cells.csv", *common, "--out", "labels").code == 0
    config = config_of("labels")
    assert (config["optimizer"], config["flip"], config["padding"]) == ("sgd", True, 0)


def test_numbers_of_photos_are_learned_and_measured_of_whole_images(photos: Path) -> None:
    """The number is what stands in the outermost columns, of which a middle crop shows nothing."""
    draw = np.random.default_rng(0)
    rows = []
    for k in range(64):
        pixels = np.full((40, 60), 128)
        number = int(draw.integers(0, 256))
        pixels[:, [0, 1, 2, -3, -2, -1]] = number
        Image.fromarray(pixels.astype(np.uint8)).save(photos / f"edge{k}.png")
        rows.append((f"edge{k}.png", number))
    with Path("edges.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "number"), *rows])
    given: dict[str, Any] = {
        "task": "regression",
        "target": "number",
        "image_size": 32,
        "bar": False,
    }
    train(data="edges.csv", out="run", epochs=12, batch_size=8, seed=1, **given)
    assert config_of("run")["crop_scale"] == 1
    predicted = load("run")([f"edge{k}.png" for k in range(64)]).values[:, 0]
    errors = predicted - torch.tensor([float(number) for _, number in rows])
    assert errors.square().mean().sqrt() < 40  # the numbers have a standard deviation of 74
    (column,) = evaluate("run", "edges.csv").columns
    assert column.mae < 30
    # Runs of earlier versions, whose facts do not say so, go on with the middle of an image.
    facts = json.loads(Path("run", "dataset.json").read_text())
    del facts["whole_images"]
    Path("run", "dataset.json").write_text(json.dumps(facts))
    assert not torch.allclose(load("run")(["edge0.png"]).values[0, 0], predicted[0])


def test_a_setting_of_sgd_alone_is_refused_where_adamw_is_the_default(photos: Path) -> None:
    given = {**TASKS["numbers"], "epochs": 1, "bar": False, "momentum": 0.8}
    with pytest.raises(InputError, match="momentum has no effect with optimizer = 'adamw'"):
        train(out="run", **given)
    train(out="run", **given, optimizer="sgd", batch_size=16)
    assert config_of("run")["momentum"] == 0.8


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("sgd", (4, 0.1)), ("rmsprop", (1, 0.1)), ("adamw", (1, 4 * 16**0.5))],
)
def test_default_learning_rates_by_the_size_of_the_gradient(
    photos: Path, optimizer: str, expected: tuple[float, float]
) -> None:
    """In that of one class per image; that of adamw grows with the root of the batch for numbers."""
    Path("classes.csv").write_text(
        "path,label\n" + "".join(f"{k:03}.png,{k % 2}\n" for k in range(NUM))
    )
    found = []
    for name, data in (("one", "classes.csv"), ("labels", "cells.csv"), ("numbers", "numbers.csv")):
        words: dict[str, Any] = (
            {"task": "regression", "target": "weight"} if name == "numbers" else {}
        )
        train(data=data, out=name, optimizer=optimizer, epochs=1, batch_size=16, bar=False, **words)
        config = tomllib.loads(Path(name, "config.toml").read_text())
        found.append(config["lr"])
    assert [value / found[0] for value in found[1:]] == pytest.approx(expected)
