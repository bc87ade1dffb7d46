"""What is tried is put back, also a buffer in whose place a forward pass puts another tensor."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.debugging.first_not_finite import first_not_finite
from flambeau.recipes.memory.memory_budget import fit_memory_budget
from flambeau.recipes.training.lr_range import lr_range_test
from flambeau.trainer.parts.model import try_forward


class Centered(nn.Module):
    """Replaces one buffer, makes one that was None, and changes one in its place."""

    mean: Tensor
    seen: Tensor | None
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 4), nn.ReLU()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("seen", None)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().flatten(0, -2).mean(0)
            self.seen = x.detach().clone()
            self.steps += 1
        return self.act(self.linear(x - self.mean))


X = torch.ones(8, 4)


def try_lr_range(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = (model(X) - 3).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    lr_range_test(step, model, optimizer, steps=5, high=0.1)


def try_first_not_finite(model: nn.Module) -> None:
    first_not_finite(model, lambda: model(X).sum())


def try_memory_budget(model: nn.Module) -> None:
    fit_memory_budget(
        model, (X,), blocks=["linear"], budget_bytes=10**9, recompute=lambda model, *names: None
    )


def try_model(model: nn.Module) -> None:
    try_forward(model, (2, 4, 4, 4), training=True)


@pytest.mark.parametrize(
    "tool",
    [try_lr_range, try_first_not_finite, try_memory_budget, try_model],
)
def test_buffers_are_put_back(tool: Callable[[nn.Module], None]) -> None:
    model = Centered()
    before = dict(model.named_buffers())
    tool(model)
    assert model.seen is None
    assert model.steps == 0
    assert dict(model.named_buffers()).keys() == before.keys()
    for name, buffer in model.named_buffers():
        assert buffer is before[name]
        assert not buffer.any()
