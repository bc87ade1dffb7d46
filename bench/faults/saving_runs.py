"""Ways of saving by flambeau itself: a `Run` that is stopped or new, `flambeau train` started by a script."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

Save = Callable[[int], None]
STOP = 60
STEPS = 1600  # at a few milliseconds each


def run_of_mine(model: nn.Module) -> Save:
    """Trains itself, to its end unless it is stopped."""
    train_run(stop=0)
    os._exit(0)


def train_run(*, stop: int) -> None:
    """`Run`, whose bits are the same however often it was stopped."""
    from flambeau import Run

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(640, 32, generator=draw), torch.randint(4, (640,), generator=draw)
    )
    run = Run(
        "runs/mine",
        model,
        optimizer,
        data,
        duration=f"{STEPS}st",
        batch_size=16,
        checkpoint_every="10st",
        log_every=10,
    )
    for _ in run.epochs():
        for x, y in run.batches():
            time.sleep(0.004)
            with run.autocast():
                loss = nn.functional.cross_entropy(model(x), y)
            run.step(loss)
            if stop and run.state.step == stop:
                os.kill(os.getpid(), signal.SIGTERM)


def prepare_stopped() -> None:
    _in_a_process(f"train_run(stop={STOP})")


def prepare_finished() -> None:
    _in_a_process("train_run(stop=0)")


def _in_a_process(call: str) -> None:
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import saving_runs; saving_runs.{call}"
    subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert Path("runs/mine/config.toml").exists()


def beside_a_finished_run(model: nn.Module) -> Save:
    """The run says that it is finished, and the script trains something else, and reports it."""
    train_run(stop=0)

    def save(step: int) -> None:
        Path("runs/mine/notes.txt").write_text(f"{step}")
        assert Path("runs/mine/notes.txt").read_text() == f"{step}"

    return save


def train_command(model: nn.Module) -> Save:
    """`flambeau train --out` by a script; the loop goes on beside its result."""
    command = [
        sys.executable,
        "-m",
        "flambeau",
        "train",
        "--out",
        "runs/by_command",
        "--duration",
        "3st",
        "--batch-size",
        "8",
        "--workers",
        "0",
        "--device",
        "cpu",
        "--model",
        "tiny_convnet",
    ]
    environment = {k: v for k, v in os.environ.items() if k != "FLAMBEAU_WATCH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr

    def save(step: int) -> None:
        Path("runs/by_command/notes.txt").write_text(f"{step}")

    return save


WAYS: dict[str, dict[str, Any]] = {
    "run_stopped": {"start": run_of_mine, "prepare": prepare_stopped},
    "run_new": {"start": run_of_mine},
    "run_finished": {"start": beside_a_finished_run, "prepare": prepare_finished},
    "train_command": {"start": train_command, "files": ("runs/other/config.toml",)},
}
"""By name: what `Way` takes."""
