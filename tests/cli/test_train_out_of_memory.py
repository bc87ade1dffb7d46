"""`flambeau train` where memory runs out: what it trains, what it says, and a real limit of the process."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

MODEL = """
import os
import torch
from torch import nn

class Net(nn.Module):
    '''Takes no more samples at once in training than LIMIT says.'''

    def __init__(self, channels, num_classes):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes))

    def forward(self, x):
        x = self.stem(x)
        if self.training and len(x) > int(os.environ.get("LIMIT", "1000")):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.head(x)

def build(channels, num_classes):
    return Net(channels, num_classes)
"""
Flambeau = Callable[..., Any]


@pytest.fixture
def train(
    flambeau: Flambeau, tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Trains such a network on 16 images for three epochs; `limit` is what fits."""
    (tmp_path / "limited.py").write_text(MODEL)

    def call(name: str, words: str = "--batch-size 8", *, limit: int = 1000) -> Any:
        monkeypatch.setenv("LIMIT", f"{limit}")
        return flambeau(
            "train", images, "--model", f"{tmp_path}/limited.py:build", "--epochs 3 --log-every 1 --seed 3",
            "--device cpu --precision fp32 --out", tmp_path / name, words,
        )  # fmt: skip

    return call


def figures(run: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("images_per_s", "data_wait")} for row in rows
    ]


def test_it_trains_what_it_would_have_been_told_to(train: Any, tmp_path: Path) -> None:
    """Weights with statistics, accuracies and the losses of each image: to the bit."""
    answer = train("halved", limit=2)
    assert answer.code == 0
    assert train("small", "--batch-size 2 --accumulate 4 --lr 0.003125").code == 0
    halved, small = tmp_path / "halved", tmp_path / "small"
    one, other = (load_file(run / "model.safetensors") for run in (halved, small))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert figures(halved) == figures(small)
    losses = [np.load(run / "sample_losses.npz") for run in (halved, small)]
    for name in ("loss", "seen", "other"):
        np.testing.assert_array_equal(losses[0][name], losses[1][name])
    assert losses[0]["seen"].tolist() == [3] * 16


def test_what_it_says(train: Any, tmp_path: Path) -> None:
    said = train("run", limit=5).err
    assert (
        "out of memory in step 1: micro-batches of 8 -> 4 samples, 2 per step; the step begins again "
        "(CUDA out of memory. Tried to allocate 2.00 GiB.)\n"
    ) in said
    (table,) = re.findall(r"(?m)^  MiB in memory .*\n(?:  .*\n)+", said)
    rows = [line.split() for line in table.splitlines()]
    # No activations: also on tensors without values this model fails.
    assert rows[0] == ["MiB", "in", "memory", "parameters", "gradients", "optimizer"]
    assert [row[0] for row in rows[1:]] == ["stem", "head", "all"]
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "out of memory in step 1: micro-batches of 8 -> 4 samples" in events
    assert "MiB in memory" not in events
    again = train("run")
    assert again.code == 0 and "this run is finished" in again.out


def test_a_resume_says_what_it_has_come_down_to(train: Any, tmp_path: Path) -> None:
    assert train("run", limit=5).code == 0
    answer = train("run", "--batch-size 8 --extend 1ep")
    assert answer.code == 0
    assert (
        "micro-batches of 4 samples, since memory ran out in step 1 (remove micro_batches.json"
        in answer.err
    )
    (tmp_path / "run" / "micro_batches.json").unlink()
    assert "micro-batches" not in train("run", "--batch-size 8 --extend 2ep").err
    assert train("run", "--batch-size 4").code == 2  # that is another run


def test_nothing_smaller_fits(train: Any) -> None:
    answer = train("run", "--dry-run --batch-size 8", limit=2)
    assert answer.code == 0
    assert "8 samples at once do not fit into memory, 2 do" in answer.err
    answer = train("run", limit=0)
    assert answer.code == 2  # the trial of the model, before anything is made


def test_out_of_memory_elsewhere_is_an_answer_too(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80.00 GiB.")

    monkeypatch.setattr("flambeau.train.fit_classifier.make_optimizer", full)
    answer = train("run")
    assert answer.code == 2
    first, second = answer.err.splitlines()[-2:]
    assert first == "flambeau: out of memory (CUDA out of memory. Tried to allocate 80.00 GiB.)"
    assert second.startswith(
        "Use a smaller --image-size or --model, --precision bf16, or --recompute"
    )


LIMITED = """
import resource, sys
import torch
from flambeau.cli.command import main
import flambeau.train.fit_classifier

def used():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData:")))

torch.ones(()).requires_grad_().backward()
resource.setrlimit(resource.RLIMIT_DATA, (used() + int(sys.argv[1]) * 2**20, resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""
RunPython = Callable[..., "subprocess.CompletedProcess[str]"]
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts there")


@needs_linux
def test_with_a_real_limit(run_python: RunPython, make_images: Any, tmp_path: Path) -> None:
    """32 images of 96 pixels want some 300 MiB at once."""
    make_images(tmp_path / "data", per_class=20, size=96)
    done = run_python(
        "-c", LIMITED, "200", "train", str(tmp_path / "data"), "--model", "small_convnet", "--device", "cpu",
        "--batch-size", "32", "--duration", "2st", "--precision", "fp32", "--out", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"micro-batches of 32 -> 16 samples, .* \(.*can't allocate memory", done.stderr
    )
    noted = json.loads((tmp_path / "run" / "micro_batches.json").read_text())
    assert noted["step"] == 1 and 2 <= noted["training"] <= 16
    (activations,) = re.findall(r"(?m)^  all .* ([\d.]+)$", done.stderr)[:1]
    assert 150 < float(activations) < 500
