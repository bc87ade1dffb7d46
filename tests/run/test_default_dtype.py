"""`torch.set_default_dtype(torch.float64)`: a run computes what a plain loop does, and resumes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from flambeau.run.run import Run


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def data() -> TensorDataset:
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    return TensorDataset(x, x**2)


def make(*, fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)


def train(folder: Path, *, fused: bool = False, stop_at: int = -1, **options: Any) -> nn.Module:
    model, optimizer = make(fused=fused)
    run = Run(
        folder, model, optimizer, data(), duration="3ep", batch_size=32, bar=False,
        best="val_loss", **options,
    )  # fmt: skip
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(mse_loss(model(x), y))
            if run.state.step == stop_at:
                run.close()
                return model
        for x, y in run.evaluate(data()):
            run.log(val_loss=mse_loss(model(x), y), val_near=(model(x) - y).abs()[:, 0] < 0.1)
    return model


def expected(*, fused: bool, max_norm: float | None) -> dict[str, Tensor]:
    model, optimizer = make(fused=fused)
    x, y = data().tensors
    for _ in range(3):
        mse_loss(model(x), y).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_a_run_in_float64_is_a_plain_loop(
    tmp_path: Path, fused: bool, max_norm: float | None
) -> None:
    found = train(tmp_path / "run", fused=fused, clip_norm=max_norm or 0.0).state_dict()
    # The norm of gradients is a float32 in fused kernels.
    rtol = 1e-6 if max_norm else 1e-12
    torch.testing.assert_close(
        found, expected(fused=fused, max_norm=max_norm), rtol=rtol, atol=1e-12
    )


@pytest.mark.parametrize(
    "options",
    [
        {"ema": 0.9, "on_nan": "rollback"},
        {"precision": "bf16", "schedule": "plateau"},
        {"precision": "fp16", "accumulate": 2},
        {"parts": 2, "schedule": "cosine"},
    ],
)
def test_a_run_in_float64_resumes(tmp_path: Path, options: dict[str, Any]) -> None:
    whole = train(tmp_path / "whole", **options)
    train(tmp_path / "run", stop_at=2, **options)
    resumed = train(tmp_path / "run", **options)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name
