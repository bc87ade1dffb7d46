"""Where NaN appears first, against models in which that place is known."""

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.debugging.first_not_finite import NotFiniteAt, first_not_finite


class Divide(nn.Module):
    """x / (x - bad): infinite for samples that hold `bad`."""

    def __init__(self, bad: float) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, x: Tensor) -> Tensor:
        return x / (x - self.bad)


def net(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), *middle, nn.Linear(3, 2))


def phases(places: list[NotFiniteAt]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(p.phase, p.name, p.samples) for p in places]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_sample_is_named_before_batch_norm_spreads_it(value: float) -> None:
    model, images = net(nn.ReLU()), torch.randn(4, 3)
    images[2, 1] = value
    found = first_not_finite(model, lambda: model(images).sum(), batch_size=4)
    assert phases(found) == [("input", "", (2,)), ("forward", "0", (2,)), ("loss", "", ())]
    assert found[0].num_values == 1
    assert found[1].num_values == 3
    assert str(found[1]) == "the output of '0' (Linear): 3 not finite, in sample 2"
    spread = first_not_finite(model[1:], lambda: model[1:](images).sum(), batch_size=4)
    assert phases(spread)[1] == ("forward", "1", (0, 1, 2, 3))  # BatchNorm mixes them


def test_the_module_that_makes_it_is_named() -> None:
    layer = Divide(bad=0.5)
    model = nn.Sequential(nn.Identity(), layer, nn.Linear(3, 2))
    images = torch.tensor([[1.0, 2.0, 3.0], [1.0, 0.5, 3.0], [0.5, 0.5, 0.0]])
    found = first_not_finite(model, lambda: model(images).sum(), batch_size=3)
    assert phases(found)[0] == ("forward", "1", (1, 2))
    assert found[0].kind == "Divide"
    assert not any(p.phase == "input" for p in found)


def test_between_modules_it_is_the_input_of_the_next() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).clamp(max=-1).log())  # type: ignore[no-any-return]

    model = Functional()
    found = first_not_finite(model, lambda: model(torch.randn(2, 3)).sum(), batch_size=2)
    assert phases(found)[0] == ("input", "last", (0, 1))


def test_a_backward_that_goes_bad_by_itself() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().sqrt()  # finite everywhere, its slope at 0 is not

    model = nn.Sequential(nn.Linear(3, 3, bias=False), Root())
    images = torch.randn(4, 3)
    images[1] = 0
    found = first_not_finite(model, lambda: model(images).sum(), batch_size=4)
    assert phases(found) == [("backward", "0", (1,)), ("gradient", "0.weight", ())]


def test_a_bad_parameter_comes_first() -> None:
    model = net()
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    found = first_not_finite(model, lambda: model(torch.randn(4, 3)).sum(), batch_size=4)
    assert phases(found)[:2] == [("parameter", "2.weight", ()), ("forward", "2", (0, 1, 2, 3))]


def test_a_loss_that_is_bad_by_itself() -> None:
    model = net()
    found = first_not_finite(model, lambda: model(torch.randn(4, 3)).sum() * float("inf"))
    assert phases(found) == [("loss", "", ())]


def test_nothing_is_found_and_nothing_changed_in_a_good_pass() -> None:
    model, images = net(nn.ReLU(inplace=True), nn.Dropout(0.5)), torch.randn(4, 3)
    model[0].weight.requires_grad_(False)
    model[3].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    assert first_not_finite(model, lambda: model(images).sum(), batch_size=4) == []
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert modes == [m.training for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks for m in model.modules())


def test_hooks_and_buffers_are_put_back_after_an_error() -> None:
    model = net()
    before = {k: v.clone() for k, v in model.state_dict().items()}

    def fails() -> Tensor:
        model(torch.randn(4, 3))
        raise KeyError("mine")

    with pytest.raises(KeyError):
        first_not_finite(model, fails)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


def test_outputs_in_containers_and_modules_used_twice() -> None:
    model = nn.ModuleDict({"lstm": nn.LSTM(3, 3, batch_first=True), "out": Divide(bad=2.0)})
    images = torch.randn(2, 5, 3)
    images[1, 0, 0] = float("nan")

    def loss_of() -> Tensor:
        output, (hidden, _) = model["lstm"](images)
        return (model["out"](output) + model["out"](output + 1)).sum() + hidden.sum()

    found = first_not_finite(model, loss_of, batch_size=2)
    assert phases(found)[:2] == [("input", "lstm", (1,)), ("forward", "lstm", (1,))]


def test_autocast_and_evaluation_without_gradients() -> None:
    model = net().eval().requires_grad_(False)
    images = torch.full((2, 3), 3e4)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.zero_()

    def loss_of() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return model(images).float().sum()

    found = first_not_finite(model, loss_of, batch_size=2)
    assert phases(found)[0] == ("forward", "0", (0, 1))  # 9e4 is beyond float16


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_sparse_gradients(power: float) -> None:
    model = nn.Embedding(5, 2, sparse=True)
    model.weight.data.zero_()  # where the slope of a root is infinite
    rows = torch.tensor([1, 3, 3])
    found = first_not_finite(model, lambda: model(rows).pow(power).sum())
    places = [(place.phase, place.name, place.num_values) for place in found]
    assert places == ([] if power == 1.0 else [("backward", "", 6), ("gradient", "weight", 4)])
