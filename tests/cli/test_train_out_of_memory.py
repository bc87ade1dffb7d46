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

    monkeypatch.setattr("flambeau.trainer.fit.make_optimizer", full)
    answer = train("run")
    assert answer.code == 2
    first, second = answer.err.splitlines()[-2:]
    assert first == "flambeau: out of memory (CUDA out of memory. Tried to allocate 80.00 GiB.)"
    assert second.startswith(
        "Use a smaller --image-size or --model, --precision bf16, or --recompute"
    )


def test_auto_is_the_run_of_the_micro_batches_that_fit(train: Any, tmp_path: Path) -> None:
    """To the bit, and with the settings that a number would have given."""
    answer = train("auto", "--batch-size auto:8", limit=5)
    assert answer.code == 0
    assert "4 samples fit into memory at once: 2 forward passes per step" in answer.err
    assert "out of memory" not in answer.err
    assert train("told", "--batch-size 4 --accumulate 2", limit=5).code == 0
    auto, told = tmp_path / "auto", tmp_path / "told"
    one, other = (load_file(run / "model.safetensors") for run in (auto, told))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert figures(auto) == figures(told)
    config = (auto / "config.toml").read_text()
    assert "batch_size = 8\n" in config


def test_a_resume_of_auto_does_not_try_again(train: Any, tmp_path: Path) -> None:
    assert train("run", "--batch-size auto:8", limit=5).code == 0
    noted = tmp_path / "run" / "micro_batches.json"
    assert json.loads(noted.read_text()) == {"step": 0, "training": 4, "evaluation": None}
    for number, words in enumerate(("auto:8", "auto", "8"), 1):
        answer = train("run", f"--batch-size {words} --extend {number}ep")
        assert answer.code == 0 and "fit into memory" not in answer.err
    noted.unlink()
    answer = train("run", "--batch-size auto --extend 4ep")
    assert answer.code == 0 and "all 8 samples of a step fit into memory" in answer.err
    answer = train("run", "--batch-size auto:16 --extend 5ep")
    assert answer.code == 2 and "batch_size" in answer.err


def test_auto_takes_the_usual_number_where_none_is_named(train: Any, tmp_path: Path) -> None:
    assert train("auto", "--batch-size auto").code == 0
    assert train("plain", "").code == 0
    auto, plain = (load_file(tmp_path / run / "model.safetensors") for run in ("auto", "plain"))
    assert all(torch.equal(auto[name], plain[name]) for name in auto)


def test_a_dry_run_of_auto(train: Any) -> None:
    answer = train("run", "--dry-run --batch-size auto:8", limit=5)
    assert answer.code == 0
    assert "8 samples at once do not fit into memory, 4 do" in answer.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--batch-size auto:0", "'auto:N' for steps of N samples, got 'auto:0'"),
        ("--batch-size many", "--batch-size: must be a whole number, 'auto', or 'auto:N'"),
        ("--batch-size 0", "batch_size must be at least 1, got 0"),
        ("--batch-size auto --accumulate 4", "leave accumulate = 4 out"),
    ],
)
def test_what_auto_refuses(train: Any, tmp_path: Path, words: str, message: str) -> None:
    answer = train("run", words)
    assert answer.code == 2 and message in answer.err
    assert not (tmp_path / "run").exists()


def test_auto_where_nothing_fits(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of the model itself is let through."""
    monkeypatch.setattr(
        "flambeau.trainer.parts.auto_batch_size.largest_batch", lambda *_, **__: None
    )
    answer = train("run", "--batch-size auto:8")
    assert answer.code == 2
    assert "out of memory, with 2 samples at once\nUse a smaller --image-size" in answer.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_auto_on_two_processes_takes_what_fits_on_both(train: Any, tmp_path: Path) -> None:
    assert train("run", "--batch-size auto:16 --procs 2", limit=5).code == 0
    assert json.loads((tmp_path / "run" / "micro_batches.json").read_text())["training"] == 8


LIMITED = """
import resource, sys
import torch
from flambeau.cli.command import main
import flambeau.trainer.fit

def used():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData:")))

# Where oneDNN finds no memory for its code once, it makes none in that thread any more, whatever is free.
torch.backends.mkldnn.enabled = False
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
        r"micro-batches of 32 -> 16 samples, .* \(.*(can't|Cannot) allocate memory", done.stderr
    )
    noted = json.loads((tmp_path / "run" / "micro_batches.json").read_text())
    assert noted["step"] == 1 and 2 <= noted["training"] <= 16
    (activations,) = re.findall(r"(?m)^  all .* ([\d.]+)$", done.stderr)[:1]
    assert 150 < float(activations) < 500
