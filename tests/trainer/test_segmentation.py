"""Masks: from folders to figures, predictions, exports and a report; what is refused; exact resumes."""

import csv
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import confusion_matrix, jaccard_score
from torch import Tensor, nn

from flambeau import evaluate, load, train
from flambeau.cli.command import main
from flambeau.data.sources.masks.mask_file import IGNORED
from flambeau.errors import InputError
from flambeau.trainer import loss as loss_module
from flambeau.trainer.parts.model import build_model
from flambeau.trainer.tasks.segmentation import Segmentation, dice_losses

NUM = 48
SIZE = 32
CLASSES = ("background", "disc", "square")
Flambeau = Callable[..., Any]

_MODEL = """
import torch
from torch import nn

def build(num_classes, channels):
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, num_classes, 1),
    )
"""
SETTINGS: dict[str, Any] = {
    "data": "shapes",
    "model": "net.py:build",
    "image_size": SIZE,
    "epochs": 4,
    "batch_size": 8,
    "lr": 0.2,
    "seed": 1,
    "bar": False,
}


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Red discs and green squares on noise, 40 x 48, whose upper two rows are ignored."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    y, x = np.mgrid[:40, :48]
    for folder in ("images", "masks"):
        (tmp_path / "shapes" / folder).mkdir(parents=True)
    for k in range(NUM):
        mask = np.zeros((40, 48), np.uint8)
        pixels = draw.integers(0, 80, (40, 48, 3))
        for number in (1, 2) if k % 3 else (1 + k % 2,):
            row, column, side = draw.integers(12, 28), draw.integers(12, 36), draw.integers(6, 10)
            far = np.maximum(abs(y - row), abs(x - column))
            near = far < side if number == 2 else (y - row) ** 2 + (x - column) ** 2 < side**2
            mask[near] = number
            pixels[near] = [200, 40, 40] if number == 1 else [40, 200, 40]
        mask[:2] = IGNORED
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "shapes" / "images" / f"{k}.png")
        Image.fromarray(mask).save(tmp_path / "shapes" / "masks" / f"{k}.png")
    (tmp_path / "shapes" / "classes.txt").write_text("\n".join(CLASSES))
    (tmp_path / "net.py").write_text(_MODEL)
    return tmp_path


def test_masks_are_learned_measured_and_shown(shapes: Path, flambeau: Flambeau) -> None:
    result = train(out="run", **SETTINGS)
    evaluation: Any = evaluate("run", "shapes")
    figures = evaluation.as_dict()
    assert figures["miou"] > 0.75 and figures["pixel_accuracy"] > 0.9
    assert result.metrics["val_loss"] == pytest.approx(figures["loss"], rel=1e-5)
    # Against scikit-learn, from the outputs themselves: of the training at the size of the model's input,
    network = load("run")
    names = [image for image, _, _ in evaluation.predictions]
    truth = []
    for name in names:
        mask = Image.open(name.replace("images", "masks"))
        truth.append(np.asarray(mask)[_nearest(40)][:, _nearest(48)])
    with torch.no_grad():
        said = network.trained.logits(network._pixels(names, 0)[0]).argmax(1).numpy()
    known = np.stack(truth) != IGNORED
    expected = jaccard_score(np.stack(truth)[known], said[known], average=None)
    assert result.metrics["val_miou"] == pytest.approx(expected.mean())
    right = (np.stack(truth)[known] == said[known]).mean()
    assert result.metrics["val_pixel_accuracy"] == pytest.approx(right)
    # and of `evaluate` at the size of the images.
    whole = np.stack([np.asarray(Image.open(name.replace("images", "masks"))) for name in names])
    with torch.no_grad():
        logits = network.trained.logits(network._pixels(names, 0)[0])
    full = F.interpolate(logits, whole.shape[1:], mode="bilinear")
    known = whole != IGNORED
    of_pixels = whole[known], full.argmax(1).numpy()[known]
    expected = jaccard_score(*of_pixels, average=None)
    assert [one["iou"] for one in figures["classes"]] == pytest.approx(expected)
    assert figures["miou"] == pytest.approx(expected.mean())
    np.testing.assert_array_equal(evaluation.confusion, confusion_matrix(*of_pixels))
    assert "nan" not in flambeau("evaluate", "run", "shapes", "--all").out
    page = Path("run/report.html").read_text()
    assert page.count("data:image/jpeg") >= 6 and "IoU" in page and "square" in page
    stored = json.loads(Path("run/evaluation.json").read_text())
    assert all("mask" not in sample for sample in stored["mistakes"])  # only for the pictures
    assert flambeau("verify", "run").code == 0
    assert flambeau("report", "run", "--out", "page.html").code == 0
    evaluation.save_predictions("all.csv")
    assert len(Path("all.csv").read_text().splitlines()) == len(names) + 1


def _nearest(length: int) -> np.ndarray:
    return np.minimum((np.arange(SIZE) * np.float32(length / SIZE)).astype(int), length - 1)


def test_predictions_are_masks_of_the_size_of_the_image(shapes: Path, flambeau: Flambeau) -> None:
    train(out="run", **{**SETTINGS, "epochs": 2})
    files = [f"shapes/images/{k}.png" for k in range(4)]
    answers = load("run")(files)
    assert [mask.shape for mask in answers.masks] == [(40, 48)] * 4
    ran = flambeau("predict", "run", *files, "--json", "--masks", "m", "--overlays", "o")
    rows = [json.loads(line) for line in ran.out.splitlines()]
    for k, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        assert row["shares"] == answer.as_dict()["shares"]
        assert sum(row["shares"].values()) == pytest.approx(1, abs=1e-5)
        with Image.open(f"m/{files[k]}") as written, Image.open(f"o/{files[k]}") as over:
            assert written.mode == "P" and (np.asarray(written) == answer.mask).all()
            assert over.size == (48, 40) and over.mode == "RGB"
    refused = flambeau("predict", "run", *files, "--masks", "m")
    assert refused.code == 2 and "--masks m holds files" in refused.err
    assert flambeau("predict", "run", files[0], "--masks", "m", "--force").code == 0
    assert flambeau("predict", "run", *files, "--out", "p.csv").code == 0
    with Path("p.csv").open() as file:
        head, *cells = csv.reader(file)
    assert head == ["path", "label", "largest_class", "share"]
    assert [row[2:] for row in cells] == [answer.cells() for answer in answers]
    mirrored = load("run")(files, flip_tta=True)
    for one, other in zip(answers, mirrored, strict=True):  # mirrored back, so hardly different
        assert (one.mask != other.mask).mean() < 0.1


def test_numbers_of_masks_are_those_of_the_data(shapes: Path) -> None:
    """Discs are 40 and squares 70, and a part that holds one of them alone is measured right."""
    for path in (shapes / "shapes" / "masks").iterdir():
        table = np.arange(256, dtype=np.uint8)
        table[[1, 2]] = 40, 70
        Image.fromarray(table[np.asarray(Image.open(path))]).save(path)
    (shapes / "shapes" / "classes.txt").unlink()
    train(out="run", **SETTINGS)
    predictor = load("run")
    assert predictor.classes == ("0", "40", "70")
    assert {*np.unique(predictor("shapes/images/4.png").masks[0])} <= {0, 40, 70}
    for folder in ("images", "masks"):
        (shapes / "part" / folder).mkdir(parents=True)
        for k in (3, 9, 15):  # with a square alone
            source = shapes / "shapes" / folder / f"{k}.png"
            (shapes / "part" / folder / source.name).write_bytes(source.read_bytes())
    figures: Any = evaluate("run", "part").as_dict()
    assert [one["pixels"] > 0 for one in figures["classes"]] == [True, False, True]
    assert figures["pixel_accuracy"] > 0.8


@pytest.mark.parametrize("kill_at", [(4, 11, 17)])
def test_a_killed_run_ends_with_the_same_bits(
    shapes: Path, kill_at: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "checkpoint_every": "3st", "color_jitter": 0.3, "ema": 0.9}
    train(out="whole", **settings)
    calls = []

    class Killed(BaseException):
        pass

    counted = loss_module.TrainingLoss.with_logits

    def dies(self: Any, *batch: Any, step: int) -> Any:
        calls.append(step)
        if step in kill_at and calls.count(step) == 1:
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
        assert (shapes / "whole" / file).read_bytes() == (shapes / "killed" / file).read_bytes()


@pytest.mark.slow
def test_parts_give_the_same_bits_on_one_to_three_ranks(
    shapes: Path, start_ranks: Callable[..., Any]
) -> None:
    words = shlex.split(
        "--model net.py:build --image-size 32 --parts 6 --batch-size 12 --epochs 2 --device cpu "
        "--workers 0 --loss cross-entropy+dice --class-weights auto"
    )

    def work(folder: str) -> int:
        return main(["train", "shapes", "--out", folder, *words])

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


def test_workers_read_what_this_process_reads(shapes: Path) -> None:
    for workers in (0, 2):
        train(out=f"run{workers}", **{**SETTINGS, "epochs": 1, "workers": workers})
    one, other = (Path(f"run{workers}/model.safetensors").read_bytes() for workers in (0, 2))
    assert one == other


# ---------------------------------------------------------------- losses


def made(num: int = 6, classes: int = 4, side: int = 9) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    outputs = torch.randn(num, classes, side, side, generator=draw)
    targets = torch.randint(0, classes - 1, (num, side, side), generator=draw, dtype=torch.uint8)
    targets[:, :2] = IGNORED
    targets[3] = IGNORED
    return outputs, targets


def task(kind: str = "cross-entropy", known: float = 7 / 9) -> Segmentation:
    return Segmentation(("a", "b", "c", "d"), (0, 1, 2, 3), known=known, kind=kind)


def test_the_cross_entropy_is_that_of_torch() -> None:
    outputs, targets = made()
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    found = task().loss(outputs, targets, smoothing=0.1, weight=weight)
    each = F.cross_entropy(
        outputs,
        targets.long(),
        weight=weight,
        ignore_index=IGNORED,
        label_smoothing=0.1,
        reduction="none",
    )
    torch.testing.assert_close(found, each.mean() * 9 / 7)
    plain = task().evaluation_figures(outputs, targets)["val_loss"]
    assert plain[3] == 0 and plain.shape == (6,)


def test_dice_is_that_of_its_definition() -> None:
    outputs, targets = made()
    found = dice_losses(outputs, targets)
    shares = outputs.softmax(1)
    for k in range(6):
        known = targets[k] != IGNORED
        scores = []
        for number in range(4):
            truth = (targets[k] == number)[known].double()
            said = shares[k, number][known].double()
            if truth.sum():
                scores.append(float(2 * (truth * said).sum() / (truth.sum() + said.sum())))
        expected = 1 - sum(scores) / len(scores) if scores else 0.0
        assert float(found[k]) == pytest.approx(expected, abs=1e-6)
    both = task("cross-entropy+dice").loss(outputs, targets, smoothing=0.0, weight=None)
    one, other = (
        task(kind).loss(outputs, targets, smoothing=0.0, weight=None)
        for kind in ("cross-entropy", "dice")
    )
    torch.testing.assert_close(both, one + other)
    torch.testing.assert_close(other, found.mean())


@pytest.mark.parametrize("kind", Segmentation.losses)
def test_ignored_pixels_have_no_gradient_and_cuts_of_a_batch_no_effect(kind: str) -> None:
    outputs, targets = made()
    outputs.requires_grad_()
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0])
    task(kind).loss(outputs, targets, smoothing=0.0, weight=weight).backward()
    assert outputs.grad is not None
    ignored = (targets == IGNORED)[:, None].expand_as(outputs)
    assert (outputs.grad[ignored] == 0).all()
    assert (outputs.grad[~ignored] != 0).all()
    whole = outputs.grad.clone()
    outputs.grad = None
    for rows in (slice(0, 2), slice(2, 6)):
        share = (rows.stop - rows.start) / 6
        loss = task(kind).loss(outputs[rows], targets[rows], smoothing=0.0, weight=weight)
        (share * loss).backward()
    torch.testing.assert_close(outputs.grad, whole)


def test_weights_of_classes_are_one_on_average(shapes: Path) -> None:
    train(out="run", **{**SETTINGS, "epochs": 1, "class_weights": "auto"})
    facts = json.loads(Path("run/dataset.json").read_text())
    counts = np.zeros(3)
    kept = [
        np.bincount(np.asarray(Image.open(path)).ravel(), minlength=256)[:3] / (40 * 48)
        for path in (shapes / "shapes" / "masks").iterdir()
    ]
    counts = np.sum(kept, axis=0)
    expected = counts.sum() / (3 * counts)
    assert facts["class_weights"] == pytest.approx(expected, rel=0.1)  # of 9 of 10 images
    assert facts["known"][0] == pytest.approx(38 / 40)
    assert facts["mask_values"] == [0, 1, 2]


def test_views_are_mirrored_back_and_averaged_as_probabilities() -> None:
    outputs, _ = made()
    other = torch.randn(6, 4, 9, 9)
    found = task().mean_of_views(outputs, other.flip(-1)).softmax(1)
    torch.testing.assert_close(found, (outputs.softmax(1) + other.softmax(1)) / 2)


# ---------------------------------------------------------------- settings and models


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "dice", "best": "val_dice", "random_erasing": 0.5, "accumulate": 2},
        {"loss": "cross-entropy+dice", "best": "val_boundary_f1", "early_stop": 1},
        {"label_smoothing": 0.1, "best": "val_pixel_accuracy", "schedule": "plateau", "ema": 0.9},
        {"eval_size": 48, "flip": False, "crop_scale": 0.5, "optimizer": "adamw", "lr": 0.01},
        {"teacher": "teacher", "color_jitter": 0.4, "best": "val_loss"},
    ],
)
def test_settings_that_work(shapes: Path, settings: dict[str, Any]) -> None:
    if "teacher" in settings:
        train(out="teacher", **{**SETTINGS, "epochs": 1})
    result = train(out="run", **{**SETTINGS, "epochs": 2, **settings})
    assert all(math.isfinite(value) for value in result.metrics.values())
    assert settings.get("best", "val_miou") in result.metrics


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixup": 0.2}, "mixup has no place in a segmentation task, as a pixel of two images"),
        ({"cutmix": 1.0}, "cutmix has no place in a segmentation task"),
        ({"balance": "full"}, "balance has no place in a segmentation task"),
        ({"augment": "randaugment"}, "color_jitter= varies colors alone"),
        ({"loss": "bce"}, r"choose one of cross-entropy, dice, cross-entropy\+dice"),
        ({"best": "val_accuracy"}, "choose one of val_miou"),
        ({"model": "small_convnet"}, "small_convnet classifies whole images"),
        ({"model": "torchvision:resnet18"}, "a segmentation model of torchvision"),
        ({"task": "multilabel"}, "has targets for segmentation, and not for multilabel"),
        ({"model": "net.py:whole"}, r"must give logits of shape \(N, 3, 32, 32\)"),
        ({"ignore_index": 300}, "ignore_index"),
    ],
)
def test_settings_that_are_refused(shapes: Path, settings: dict[str, Any], message: str) -> None:
    with Path("net.py").open("a") as file:
        file.write(
            "\n\ndef whole(num_classes, channels):\n    pool = nn.AdaptiveAvgPool2d(1)\n"
            "    return nn.Sequential(pool, nn.Flatten(), nn.Linear(channels, num_classes))\n"
        )
    with pytest.raises(InputError, match=message):
        train(out="run", **{**SETTINGS, **settings})
    assert not Path("run").exists()


def test_a_bad_mask_ends_a_training_before_it_begins(shapes: Path, flambeau: Flambeau) -> None:
    path = shapes / "shapes" / "masks" / "5.png"
    Image.new("L", (7, 9)).save(path)
    words = ("train", "shapes", "--model net.py:build --image-size 32 --epochs 1 --out run")
    refused = flambeau(*words)
    assert refused.code == 2 and "Traceback" not in refused.err
    assert f"its mask {path} is 7 x 9, and the image 48 x 40" in refused.err
    assert not Path("run").exists()
    assert flambeau(*words, "--skip-bad-images 1").code == 0
    checked = flambeau("check", "shapes")
    assert "1 image with a mask that cannot be used" in checked.out


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--compile", "--batch-size auto:16"])
def test_targets_of_noise_are_masks(shapes: Path, words: str, flambeau: Flambeau) -> None:
    """What is compiled, or tried for its memory, before the first step."""
    given = "--model net.py:build --image-size 32 --epochs 1 --device cpu --out run"
    ran = flambeau("train", "shapes", given, words)
    assert ran.code == 0, ran.err


def test_a_difference_of_masks_is_found(shapes: Path, flambeau: Flambeau) -> None:
    settings = {**SETTINGS, "epochs": 1}
    train(out="one", **settings)
    train(out="same", **settings)
    assert flambeau("diff", "one", "same").code == 0
    shutil.copytree("shapes", "changed")
    path = Path("changed/masks/7.png")
    with Image.open(path) as mask:
        mask.putpixel((20, 20), 2 - (mask.getpixel((20, 20)) == 2))
        mask.save(path)
    train(out="other", **{**settings, "data": "changed"})
    ran = flambeau("diff", "one", "other")
    assert ran.code == 1 and "7.png" in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenetv3_small_050", "torchvision:lraspp_mobilenet_v3_large"]
)
def test_models_of_others_give_logits_for_each_pixel(name: str) -> None:
    shape: dict[str, Any] = {"num_classes": 5, "channels": 3, "image_size": 64}
    model = build_model(name, per_pixel=True, **shape)
    assert model.eval()(torch.zeros(2, 3, 96, 80)).shape == (2, 5, 96, 80)
    assert isinstance(model, nn.Module)
    model.train()
    loss = model(torch.randn(2, 3, 64, 64)).square().mean()
    loss.backward()
    unused = [key for key, p in model.named_parameters() if p.grad is None]
    assert unused == []


@pytest.mark.slow
def test_models_of_smp(shapes: Path, flambeau: Flambeau) -> None:
    pytest.importorskip("segmentation_models_pytorch")
    words = ("train", "shapes", "--image-size 32 --epochs 1 --batch-size 8 --device cpu")
    assert flambeau(*words, "--model smp:Unet/resnet18 --out run").code == 0
    assert load("run")("shapes/images/1.png").masks[0].shape == (40, 48)
    for name, message in (("smp:Unetz", "Unetz"), ("smp:Unet/resnet17", "resnet17")):
        refused = flambeau(*words, f"--model {name} --out other")
        assert refused.code == 2 and "segmentation_models_pytorch cannot make" in refused.err
        assert message in refused.err and "Traceback" not in refused.err


# ---------------------------------------------------------------- export


@pytest.mark.parametrize("form", ["torch-export", "onnx"])
def test_an_export_gives_the_mask_of_the_run(shapes: Path, form: str, flambeau: Flambeau) -> None:
    train(out="run", **{**SETTINGS, "epochs": 2})
    ran = flambeau("export", "run", f"--format {form} --out served")
    assert ran.code == 0, ran.err
    files = [f"shapes/images/{k}.png" for k in range(3)]
    of_run, of_export = (
        flambeau("predict", folder, *files, "--json") for folder in ("run", "served")
    )
    for one, other in zip(of_run.out.splitlines(), of_export.out.splitlines(), strict=True):
        ours, theirs = json.loads(one)["shares"], json.loads(other)["shares"]
        assert ours == pytest.approx(
            theirs, abs=0.01
        )  # bfloat16 of the run, where the machine has it
    about = json.loads(Path("served/export.json").read_text())
    assert about["task"] == "segmentation" and about["mask_values"] == [0, 1, 2]
    assert about["steps"][-1]["agreement"] > 0.9
    assert Path("served/export.json").stat().st_size < 200_000
    assert re.search(r"output `mask` \| \(N, H, W\) uint8", Path("served/README.md").read_text())
    pixels = torch.from_numpy(np.asarray(Image.open(files[0])).copy())[None]
    size = torch.tensor([40, 48])
    if form == "torch-export":
        module = torch.export.load("served/model.pt2").module()
        mask = module(pixels, size)[1][0].numpy()
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession("served/model.onnx")
        [[mask]] = session.run(["mask"], {"pixels": pixels.numpy(), "full_size": size.numpy()})
    assert mask.shape == (40, 48) and mask.dtype == np.uint8
    assert (mask == load("run")(files[0]).masks[0]).mean() > 0.98
