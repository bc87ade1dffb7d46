"""`flambeau train --qat`: a run that rounds to eight bits, and its exports."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flambeau.cli.command import main
from flambeau.recipes.compress.fake_quantize import QuantizedLayer
from flambeau.trainer.prediction.trained_model import load_trained

pytestmark = pytest.mark.usefixtures("in_tmp_path")
WORDS = "--model small_convnet --image-size 32 --batch-size 16 --precision fp32 --qat"


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def photos(exported_run: Path) -> Path:
    return exported_run.parent / "photos"


@pytest.fixture(scope="module")
def rounded_run(
    exported_run: Path,
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """Of 9 steps with a checkpoint every 3."""
    out = tmp_path_factory.mktemp("rounded") / "run"
    words = [*WORDS.split(), "--duration", "9st", "--checkpoint-every", "3st", "--keep", "5"]
    words += ["--weights", str(exported_run), "--out", str(out)]
    with kept_process():
        assert main(["train", str(exported_run.parent / "photos"), *words]) == 0
    return out


def accuracy(flambeau: Any, run: Path, photos: Path) -> float:
    answer = flambeau("evaluate", run, photos, "--json")
    assert answer.code == 0, answer.err
    return float(json.loads(answer.out.splitlines()[-1])["accuracy"])


def test_it_starts_from_the_weights_and_keeps_the_accuracy(
    rounded_run: Path, exported_run: Path, photos: Path, flambeau: Any
) -> None:
    before = load_file(exported_run / "model.safetensors")
    model = load_trained(rounded_run, say=print).model
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    assert len(layers) >= 7
    assert "head" in layers
    assert not [n for n, m in model.named_modules() if isinstance(m, torch.nn.BatchNorm2d)]
    head = layers["head"].layer.get_parameter("weight").detach().cpu()
    assert 0 < float((head - before["head.weight"]).abs().max()) < 0.1
    was, now = (accuracy(flambeau, run, photos) for run in (exported_run, rounded_run))
    assert now >= was - 0.05


def test_first_ranges_are_those_of_the_training_images(
    exported_run: Path, photos: Path, flambeau: Any
) -> None:
    """A learning rate of nearly nothing leaves what was chosen before the first step."""
    words = f"{WORDS} --duration 1st --lr 1e-9 --out run --weights"
    assert flambeau("train", photos, words, exported_run).code == 0
    trained = load_trained(Path("run"), say=print)
    stem = trained.model.get_submodule("stem.0")
    assert isinstance(stem, QuantizedLayer)
    quantize = stem.quantize_input
    mean, std = np.array(trained.facts.mean), np.array(trained.facts.std)
    low, high = ((value - mean) / std for value in (0, 1))
    steps = float(quantize.scale.detach()) * 255
    assert steps == pytest.approx(float(high.max() - low.min()), rel=0.15)


def test_a_resume_gives_the_same_bits(
    rounded_run: Path, exported_run: Path, photos: Path, flambeau: Any, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    shutil.copytree(rounded_run, again)
    for name in ("step-00000006", "step-00000009"):
        shutil.rmtree(again / "checkpoints" / name)
    for name in ("model.safetensors", "result.json", "report.html"):
        (again / name).unlink()
    words = f"{WORDS} --duration 9st --checkpoint-every 3st --keep 5 --weights"
    answer = flambeau("train", photos, words, exported_run, "--out", again)
    assert answer.code == 0, answer.err
    assert "resum" in answer.err + answer.out
    assert (again / "model.safetensors").read_bytes() == (
        rounded_run / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", ["onnx", pytest.param("torch-export", marks=pytest.mark.slow)])
def test_export_has_the_answers_and_a_byte_per_weight(
    rounded_run: Path, photos: Path, flambeau: Any, tmp_path: Path, name: str
) -> None:
    if name == "onnx":
        pytest.importorskip("onnxruntime")
    out = tmp_path / "shipped"
    words = f"--allow-slower --json --format {name} --data"
    answer = flambeau("export", rounded_run, words, photos, "--out", out)
    assert answer.code == 0, answer.err
    [told] = map(json.loads, answer.out.splitlines())
    run, qat, file = told["steps"]
    assert qat["step"] == "qat"
    assert qat["bytes"] < 0.3 * run["bytes"]
    assert file["bytes"] < run["bytes"]
    assert file["agreement"] >= 0.98
    assert flambeau("verify", out).code == 0
    assert accuracy(flambeau, out, photos) == pytest.approx(file["accuracy"], abs=1e-6)
    stored = json.loads((out / "export.json").read_text())
    assert stored["settings"]["qat"] is True
    assert stored["settings"]["weights"] == "run", "its name, not its place"


def test_refusals(rounded_run: Path, exported_run: Path, photos: Path, flambeau: Any) -> None:
    def told(*words: Any) -> str:
        answer = flambeau(*words)
        assert answer.code == 2
        assert "Traceback" not in answer.err
        return str(answer.err)

    assert "qat starts from trained weights: give --weights RUN" in told("train", photos, "--qat")
    both = told("train", photos, WORDS, "--shard fsdp --weights", exported_run)
    assert "shard = 'fsdp' and qat do not go together" in both
    for words in (
        "--fold", "--prune 0.5", "--reparameterize", "--quantize int8 --format onnx",
        "--format safetensors",
    ):  # fmt: skip
        flag = words if words.startswith("--format") else words.split()[0]
        refused = told("export", rounded_run, "--out out", words)
        assert f"trained with --qat, folded and rounded: {flag} does not go with that" in refused
    assert not Path("out").exists()
    words = f"{WORDS} --duration 1st --freeze backbone --out frozen --weights"
    assert "did you mean" not in told("train", photos, words, exported_run)


@pytest.mark.slow
def test_run_with_a_teacher_and_its_file_is_exported(
    exported_run: Path, photos: Path, flambeau: Any
) -> None:
    words = f"{WORDS.removesuffix(' --qat')} --duration 1st --out run --teacher"
    assert flambeau("train", photos, words, exported_run).code == 0
    answer = flambeau("export run --allow-slower --out shipped --data", photos)
    assert answer.code == 0, answer.err
    assert json.loads(Path("shipped/export.json").read_text())["settings"]["teacher"] == "run"
    assert flambeau("predict shipped", photos / "waves").code == 0
