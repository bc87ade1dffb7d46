"""`flambeau soup`: weights of several runs averaged, uniformly and greedily, on their held-out images."""

import contextlib
import hashlib
import json
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
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from flambeau import load, train
from flambeau.data.sources.open_data import open_sources
from flambeau.recipes.data.sample_order import sample_order
from refused import refused

Flambeau = Callable[..., Any]
NET = """
from torch import nn

def norm(num_classes, channels):
    return nn.Sequential(
        nn.Conv2d(channels, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(24, num_classes),
    )

def plain(num_classes, channels):
    return nn.Sequential(nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * channels, num_classes))

def wide(num_classes, channels):
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, num_classes))
"""
COMMON: dict[str, Any] = {
    "data": "photos",
    "bar": False,
    "precision": "fp32",
    "batch_size": 16,
    "image_size": 12,
    "model": "net.py:norm",
    "best": "val_loss",
}


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """Photos of three classes, and runs that were fine-tuned from one."""
    root = tmp_path_factory.mktemp("soup")
    (root / "net.py").write_text(NET)
    draw = np.random.default_rng(0)
    for label, name in enumerate("abc"):
        (root / "photos" / name).mkdir(parents=True)
        for k in range(60):
            pixels = draw.integers(0, 200, (14, 15, 3))
            pixels[:, :, label] += draw.integers(0, 55)
            Image.fromarray(pixels.astype(np.uint8)).save(root / f"photos/{name}/{k:02}.png")
    noisy: dict[str, Any] = {
        "epochs": 4,
        "lr": 0.1,
        "schedule": "constant",
        "label_smoothing": 0.0,
    }
    made: dict[str, dict[str, Any]] = {
        "base": {"epochs": 6, "lr": 0.2},
        "one": {"weights": "base", "seed": 11, **noisy},
        "two": {"weights": "base", "seed": 12, **noisy},
        "three": {"weights": "base", "seed": 13, **noisy},
        "plain": {"epochs": 1, "model": "net.py:plain"},
        "wide": {"epochs": 1, "model": "net.py:wide"},
        "accuracy": {"epochs": 1, "best": "val_accuracy"},
    }
    with kept_process(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for name, settings in made.items():
            train(out=name, **{**COMMON, **settings})
    return root


@pytest.fixture(autouse=True)
def _in_the_folder(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)


RUNS = ("one", "two", "three")


def weights_of(run: str | Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(Path(run) / "model.safetensors")


class Reference:
    """The same by torch's own functions, and the paper's recipe."""

    def __init__(self) -> None:
        predictor = load("one", say=lambda _: None)
        self.net: nn.Module = predictor.model
        train_data, val = open_sources(Path("photos"))
        order = sample_order(len(train_data), seed=0, epoch=0).tolist()
        files = [train_data.describe(k) for k in order]
        whole = len(files) // 64 * 64
        self.batches = [predictor.preprocess(files[at : at + 64]) for at in range(0, whole, 64)]
        self.val = predictor.preprocess([val.describe(k) for k in range(len(val))])
        self.labels = val.labels

    def loss(self, runs: tuple[str, ...]) -> float:
        states = [weights_of(run) for run in runs]
        mean = {k: sum(one[k].double() for one in states) / len(states) for k in states[0]}
        self.net.load_state_dict({k: v.to(states[0][k].dtype) for k, v in mean.items()})
        if len(runs) > 1:
            update_bn(self.batches, self.net)
        self.net.eval()
        with torch.inference_mode():
            return float(F.cross_entropy(self.net(self.val), self.labels))

    def greedy(self) -> tuple[tuple[str, ...], float]:
        first, *others = sorted(RUNS, key=lambda run: self.loss((run,)))
        inside, best = (first,), self.loss((first,))
        for run in others:
            if (tried := self.loss((*inside, run))) <= best:
                inside, best = (*inside, run), tried
        return inside, best


@pytest.fixture
def soup(tmp_path: Path, flambeau: Flambeau) -> tuple[Path, dict[str, Any]]:
    answer = flambeau("soup", *RUNS, "--json --out", tmp_path / "soup")
    assert answer.code == 0, answer
    return tmp_path / "soup", json.loads(answer.out)


def test_it_is_that_of_the_paper(soup: tuple[Path, dict[str, Any]]) -> None:
    folder, said = soup
    reference = Reference()
    for one in said["runs"]:
        assert one["value"] == pytest.approx(reference.loss((one["run"],)), rel=1e-5)
    uniform = reference.loss(RUNS)
    inside, greedy = reference.greedy()
    assert said["uniform"] == pytest.approx(uniform, rel=1e-4)
    assert said["greedy"] == pytest.approx(greedy, rel=1e-4)
    assert said["greedy_runs"] == [*inside]
    assert said["took"] == ("uniform" if uniform < greedy else "greedy")
    best = min(one["value"] for one in said["runs"])
    assert said["gain"] == pytest.approx(best - min(uniform, greedy), rel=1e-3, abs=1e-6)
    assert said["num_norm_images"] == 128
    reference.loss(RUNS if said["took"] == "uniform" else inside)
    for name, tensor in reference.net.state_dict().items():
        if "num_batches" not in name:
            torch.testing.assert_close(weights_of(folder)[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_same_soup_has_the_same_bits(
    soup: tuple[Path, dict[str, Any]], tmp_path: Path, flambeau: Flambeau
) -> None:
    folder, _ = soup
    assert flambeau("soup", *RUNS, "--out", tmp_path / "again").code == 0
    assert flambeau("evaluate one photos --calibrate").code == 0  # has no part in it
    assert flambeau("soup", *RUNS, "--out", tmp_path / "calibrated").code == 0
    Path("one/calibration.json").unlink()
    for name in ("model.safetensors", "result.json", "soup.json", "config.toml", "evaluation.json"):
        for other in ("again", "calibrated"):
            assert (folder / name).read_bytes() == (tmp_path / other / name).read_bytes()


def test_it_is_a_finished_run_for_every_command(
    soup: tuple[Path, dict[str, Any]], tmp_path: Path, flambeau: Flambeau
) -> None:
    folder, said = soup
    answer = flambeau("verify", folder)
    assert answer.code == 0 and "model.safetensors: whole (soup weights" in answer.out
    figures = json.loads(flambeau("evaluate", folder, "photos --json").out)
    assert figures["loss"] == pytest.approx(min(said["uniform"], said["greedy"]), rel=1e-4)
    assert figures["trained_on"] == 162
    result = json.loads((folder / "result.json").read_text())
    assert result["metrics"]["val_loss"] == pytest.approx(figures["loss"], rel=1e-6)
    assert result["metrics"]["val_accuracy"] == pytest.approx(figures["accuracy"])
    assert flambeau("predict", folder, "photos/a/00.png").code == 0
    assert flambeau("export", folder, "--allow-slower --out", tmp_path / "shipped").code == 0
    assert flambeau("report", folder, "--out", tmp_path / "page.html").code == 0
    shown = json.loads(flambeau("runs", tmp_path, "--json").out.splitlines()[0])
    assert shown["state"] == "finished"
    about = json.loads((folder / "soup.json").read_text())
    assert [one["run"] for one in about["runs"]] == [*RUNS]
    assert {len(one["sha256"]) for one in about["runs"]} == {64}
    more = "--epochs 1 --batch-size 16 --image-size 12 --precision fp32 --model net.py:norm"
    answer = flambeau("train photos", more, "--weights", folder, "--out", tmp_path / "next")
    assert answer.code == 0, answer.err


def test_nothing_is_trained_over_it(soup: tuple[Path, dict[str, Any]], flambeau: Flambeau) -> None:
    folder, _ = soup
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    refused(
        flambeau("train photos --extend 1ep --out", folder),
        "the average of several runs",
        "--weights",
    )
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


def test_what_verify_finds(soup: tuple[Path, dict[str, Any]], flambeau: Flambeau) -> None:
    folder, _ = soup
    (folder / "soup.json").write_text("{}")
    answer = flambeau("verify", folder)
    assert answer.code == 1 and "soup.json does not name the runs" in answer.out
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    assert "DAMAGED" in flambeau("verify", folder).out


def test_what_cannot_be_averaged_is_refused(root: Path, tmp_path: Path, flambeau: Flambeau) -> None:
    out = tmp_path / "out"
    refused(flambeau("soup one --out", out), "at least two runs")
    refused(flambeau("soup one one --out", out), "one is named twice")
    refused(flambeau("soup one plain --out", out), "plain cannot be averaged with one", "model")
    refused(flambeau("soup plain wide --out", out), "its model is")
    refused(flambeau("soup one accuracy --out", out), "best is val_accuracy")
    refused(flambeau("soup one nowhere --out", out), "nowhere does not exist")
    refused(flambeau("soup one two --out one"), "one exists")
    refused(flambeau("soup one two --out photos/soup"), "would lie within the data")
    assert not Path("photos/soup").exists()
    copy = tmp_path / "copy"
    shutil.copytree("two", copy)
    facts = json.loads((copy / "dataset.json").read_text())
    (copy / "dataset.json").write_text(json.dumps({**facts, "val_fingerprint": "0" * 64}))
    refused(flambeau("soup one", copy, "--trust --out", out), "the held-out images are another")
    (copy / "dataset.json").write_text(json.dumps({**facts, "classes": ["a", "b", "d"]}))
    refused(flambeau("soup one", copy, "--trust --out", out), "the classes are another")
    (copy / "result.json").unlink()
    (copy / "dataset.json").write_text(json.dumps(facts))
    refused(flambeau("soup one", copy, "--trust --out", out), "is not finished")
    assert not out.exists()


def test_runs_from_different_random_weights_have_no_average(
    root: Path, tmp_path: Path, flambeau: Flambeau
) -> None:
    """A long training from random weights: the average knows nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        draw = np.random.default_rng(1)
        for label, name in enumerate("ab"):
            (tmp_path / "easy" / name).mkdir(parents=True)
            for k in range(24):
                pixels = draw.integers(0, 90, (12, 12, 3))
                pixels[:, 6 * label : 6 * label + 6] += 150
                Image.fromarray(pixels.astype(np.uint8)).save(f"easy/{name}/{k}.png")
        shutil.copy(root / "net.py", "net.py")
        for seed in (0, 5):
            train(
                out=f"run{seed}",
                **{**COMMON, "data": "easy", "epochs": 20, "lr": 0.5, "seed": seed},
            )
        message = refused(
            flambeau("soup run0 run5 --out soup"),
            "no average is as good as",
            "different random weights",
        )
        assert "--weights RUN or --pretrained" in message
        assert not Path("soup").exists()


@pytest.mark.parametrize("task", ["numbers", "labels", "masks"])
def test_other_tasks(task: str, tmp_path: Path, flambeau: Flambeau) -> None:
    (tmp_path / "net.py").write_text(
        NET
        + "\ndef pixels(num_classes, channels):\n    return nn.Conv2d(channels, num_classes, 1)\n"
    )
    draw = np.random.default_rng(2)
    rows = ["path,weight,tags"]
    for folder in ("shapes/images", "shapes/masks"):
        (tmp_path / folder).mkdir(parents=True)
    for k in range(40):
        mask = (np.mgrid[:12, :12][k % 2] > 5).astype(np.uint8)
        pixels = (60 * (k % 3) + 90 * mask + draw.integers(0, 50, mask.shape)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"shapes/images/{k}.png")
        Image.fromarray(mask).save(tmp_path / f"shapes/masks/{k}.png")
        rows.append(f"shapes/images/{k}.png,{k % 3 * 10 + k / 40},{'|'.join('xy'[: 1 + k % 2])}")
    (tmp_path / "shapes" / "classes.txt").write_text("left\nright")
    (tmp_path / "table.csv").write_text("\n".join(rows))
    settings: dict[str, Any] = {
        "numbers": {"data": "table.csv", "target": "weight", "task": "regression"},
        "labels": {
            "data": "table.csv",
            "target": "tags",
            "task": "multilabel",
            "label_separator": "|",
        },
        "masks": {"data": "shapes", "model": "net.py:pixels", "epochs": 20, "lr": 0.3},
    }[task]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        train(out="base", **{**COMMON, "epochs": 6, **settings})
        for name, sign in (("plus", 1), ("minus", -1)):  # whose mean is what was trained
            moved("base", name, sign)
        answer = flambeau("soup plus minus --json --out soup")
        assert answer.code == 0, answer
        said = json.loads(answer.out)
        assert said["gain"] > 0 and {*said["greedy_runs"]} == {"plus", "minus"}
        for name, tensor in weights_of("base").items():
            if "running" not in name and tensor.is_floating_point():
                torch.testing.assert_close(weights_of("soup")[name], tensor)
        assert flambeau("verify soup").code == 0
        figures = json.loads(flambeau("evaluate soup", settings["data"], "--json").out)
        assert figures["loss"] == pytest.approx(said["uniform"], rel=1e-4)
        assert flambeau("report soup --out page.html").code == 0


def moved(run: str, out: str, sign: int) -> None:
    """A copy of a run with its weights moved to one side."""
    shutil.copytree(run, out)
    generator = torch.Generator().manual_seed(0)
    state = weights_of(run)
    for name, tensor in state.items():
        if "running" not in name and tensor.is_floating_point():
            state[name] = tensor + sign * 0.5 * torch.randn(tensor.shape, generator=generator)
    content = safetensors.torch.save(state)
    Path(out, "model.safetensors").write_bytes(content)
    result = json.loads(Path(out, "result.json").read_text())
    result["sha256"] = hashlib.sha256(content).hexdigest()
    Path(out, "result.json").write_text(json.dumps(result))
