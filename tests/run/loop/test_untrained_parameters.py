"""A run says which parameters its first step does not train."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flambeau import Run


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.used = nn.Linear(4, 1)
        self.unused = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(self.body(x))


def said(
    folder: Path,
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    capfd: pytest.CaptureFixture[str],
    *,
    ends_after: int = 6,
) -> str:
    """What a run of six steps prints; it is left after some of them."""
    data = TensorDataset(torch.ones(24, 3))
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    run = Run(folder, model, optimizer, data, batch_size=4, duration="6st", checkpoint_every="1st")
    for _ in run.epochs():
        for (x,) in run.batches():
            if run.state.step == ends_after:
                run.close()
                return capfd.readouterr().err
            run.step(model(x).mean())
    return capfd.readouterr().err


def test_a_part_without_effect_is_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = TwoHeads()
    text = said(tmp_path / "run", model, model.parameters(), capfd)
    line = "2 of 6 trainable parameters (unused.weight, unused.bias) are without a gradient"
    assert text.count(line) == 1
    assert "not in the optimizer" not in text


def test_what_the_optimizer_lacks_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = TwoHeads()
    text = said(tmp_path / "run", model, model.used.parameters(), capfd)
    named = "4 of 6 trainable parameters (body.weight, body.bias, unused.weight, ...) are not in"
    assert text.count(named) == 1
    assert "without a gradient" not in text


def test_frozen_ones_are_meant(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = TwoHeads()
    model.body.requires_grad_(False)
    model.unused.requires_grad_(False)
    text = said(tmp_path / "run", model, model.used.parameters(), capfd)
    assert "trainable parameters" not in text


def test_a_resumed_run_says_nothing_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for ends_after, times in ((3, 1), (6, 0)):
        model = TwoHeads()
        text = said(tmp_path / "run", model, model.parameters(), capfd, ends_after=ends_after)
        assert text.count("trainable parameters") == times
    assert "going on from step 3" in text
