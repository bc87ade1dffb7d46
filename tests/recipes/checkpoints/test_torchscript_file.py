"""Old TorchScript files: their weights come out, and a frozen branch is refused."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.checkpoints.torchscript_file import from_torchscript


class Gate(nn.Module):
    """Twice the input where its sum is positive, else the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return 2 * x if x.sum() > 0 else x


def saved(path: Path, make: Callable[[], Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(make(), path)
    return path


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(1)).eval()


def test_weights_of_a_traced_file(tmp_path: Path, network: nn.Module) -> None:
    path = saved(tmp_path / "old.pt", lambda: torch.jit.trace(network, torch.rand(2, 3, 8, 8)))
    new = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(1))
    before = {name: tensor.clone() for name, tensor in new.state_dict().items()}
    result = from_torchscript(path, new, [torch.rand(n, 3, 8, 8) - 0.5 for n in (1, 5)])
    x = torch.rand(3, 3, 8, 8)
    assert torch.equal(result(x), network(x))
    assert not result.training
    assert all(torch.equal(before[name], tensor) for name, tensor in new.state_dict().items())
    assert torch.export.export(result, (x,)).module()(x).shape == (3, 144)


def test_traced_branch_is_refused_and_a_scripted_one_is_not(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gate().requires_grad_(False)
    model.layer.weight.copy_(torch.eye(2))
    model.layer.bias.zero_()
    up, down = torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, -2.0]])
    traced = saved(tmp_path / "traced.pt", lambda: torch.jit.trace(model, up))
    with pytest.raises(
        ValueError, match=r"(?s)differ on input 1 \(1 x 2\).*frozen a branch"
    ) as caught:
        from_torchscript(traced, Gate(), [up, down])
    assert "traced.pt" in str(caught.value)
    scripted = saved(tmp_path / "scripted.pt", lambda: torch.jit.script(model))
    result = from_torchscript(scripted, Gate(), [up, down])
    assert result(down).tolist() == [[-1.0, -2.0]]


def test_an_input_that_one_of_both_cannot_take(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor, times: int = 1) -> Tensor:
            for row in x:  # as many as the example has
                x = x + row * self.weight * times
            return x

    path = saved(tmp_path / "old.pt", lambda: torch.jit.trace(Sum(), torch.ones(2, 3)))
    with pytest.raises(ValueError, match="differ on input 0 \\(3 x 3\\)"):
        from_torchscript(path, Sum(), [torch.ones(3, 3)])
    with pytest.raises(ValueError, match=r"input 0 \(2 x 3, 2\): the file fails with"):
        from_torchscript(path, Sum(), [(torch.ones(2, 3), 2)])


def test_what_is_no_such_file(tmp_path: Path, network: nn.Module) -> None:
    x = torch.rand(1, 3, 8, 8)
    with pytest.raises(FileNotFoundError, match=r"gone\.pt"):
        from_torchscript(tmp_path / "gone.pt", network, [x])
    (tmp_path / "text.pt").write_text("no")
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    for name in ("text.pt", "weights.pt"):
        with pytest.raises(ValueError, match=f"{name} is no TorchScript that this torch reads"):
            from_torchscript(tmp_path / name, network, [x])
    path = saved(tmp_path / "old.pt", lambda: torch.jit.trace(network, x))
    with pytest.raises(ValueError, match=r"(?s)weights of another model.*Missing key"):
        from_torchscript(path, nn.Linear(2, 2), [x])
    with pytest.raises(ValueError, match="at least one input"):
        from_torchscript(path, network, [])
