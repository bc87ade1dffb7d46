"""One batch is learned by heart after the watch, and nothing of it stays."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flambeau.tune.watch.learning.losses import LossCall
from flambeau.tune.watch.learning.rehearsal import ModelCall, Rehearsal, is_reshaped, output_of


def kept(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Rehearsal:
    output = model(x)
    loss = LossCall("cross_entropy", F.cross_entropy, {"target": y}, output.shape, None)
    rehearsal = Rehearsal()
    rehearsal.keep(ModelCall(model, (x,), output_of(output)), loss)
    return rehearsal


def batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 3))
    return model, torch.randn(16, 8), torch.randint(3, (16,))


def test_it_learns_by_heart_and_finds_the_rate_and_leaves_no_trace() -> None:
    model, x, y = batch()
    rehearsal = kept(model, x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    before = [one.detach().clone() for one in [*model.parameters(), *model.buffers()]]
    gradients = [one.grad for one in model.parameters()]
    told = rehearsal.results(optimizer)
    after = [*model.parameters(), *model.buffers()]
    torch.testing.assert_close([one.detach() for one in after], before, rtol=0, atol=0)
    assert all(one.grad is two for one, two in zip(model.parameters(), gradients, strict=True))
    assert len({one["first"] for one in told["by_heart"] + told["rates"]}) == 1  # the same weights
    assert told["by_heart"][-1]["last"] < 0.1 * told["by_heart"][-1]["first"]
    assert [one["rate"] for one in told["rates"]] == pytest.approx(
        [1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2]
    )
    assert min(told["rates"], key=lambda one: float(one["last"]))["factor"] == 1e3


def test_a_model_that_cannot_be_called_again_is_left_alone() -> None:
    class Once(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("the state was freed")
            return super().forward(x)

    _, x, y = batch()
    model = Once(8, 3)
    before = model.weight.detach().clone()
    told = kept(model, x, y).results(torch.optim.SGD(model.parameters(), lr=0.1))
    assert told == {"by_heart": [], "rates": []}
    assert torch.equal(model.weight, before)
    assert Rehearsal().results(None) == {}


def test_a_model_that_is_frozen_by_now_is_left_alone() -> None:
    model, x, y = batch()
    rehearsal = kept(model, x, y)
    model.requires_grad_(False)
    assert rehearsal.results(None) == {}


def test_what_the_loss_gets_must_be_the_output_of_the_model() -> None:
    output = torch.randn(4, 6, 1)
    assert is_reshaped(output, output.flatten(0, 1)) and is_reshaped(output, output[..., 0])
    assert not is_reshaped(output, output.transpose(0, 1))
    assert not is_reshaped(output, output + 0)
    assert not is_reshaped(output, output[:2])
    assert not is_reshaped(None, output)
