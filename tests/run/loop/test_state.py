"""What is put back from a checkpoint is laid out in memory as what it belongs to."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau import Run
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    from_bytes,
    read_checkpoint,
    save_checkpoint,
    to_bytes,
)


class Crash(Exception):
    """The machine is gone."""


def train(folder: Path, *, crash_at: int = -1) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 2)
    ).to(memory_format=torch.channels_last)
    x = torch.randn(32, 3, 8, 8)
    data = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    run = Run(
        folder, model, optimizer, data, duration="6st", batch_size=8, checkpoint_every="2st", keep=9,
        bar=False,
    )  # fmt: skip
    for _ in run.epochs():
        for images, targets in run.batches():
            x = images.contiguous(memory_format=torch.channels_last)
            run.step(cross_entropy(model(x), targets))
            if run.state.step == crash_at:
                raise Crash
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_the_optimizer_goes_on_whatever_the_strides_in_the_checkpoint(tmp_path: Path) -> None:
    """A sharded run writes them in another layout, and the kernel of a fused step goes through memory."""
    undisturbed = train(tmp_path / "whole")
    with pytest.raises(Crash):
        train(tmp_path / "run", crash_at=3)
    newest = tmp_path / "run" / "checkpoints" / "step-00000002"
    old = read_checkpoint(newest)
    state = from_bytes(old.files["training_state.pt"])
    changed = 0
    for entries in state["optimizer"]["state"].values():
        buffer = entries["momentum_buffer"]
        entries["momentum_buffer"] = buffer.contiguous()
        changed += not buffer.is_contiguous()
    assert changed == 2
    shutil.rmtree(newest)
    save_checkpoint(newest, {**old.files, "training_state.pt": to_bytes(state)}, meta=old.meta)
    resumed = train(tmp_path / "run")
    for name, tensor in undisturbed.items():
        assert torch.equal(tensor, resumed[name]), name
