import copy

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.training.weight_penalty import (
    penalized_parameters,
    soft_threshold,
    weight_penalty,
)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LayerNorm([16]), nn.Linear(16, 3)
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, l1: float = 0.0, l2: float = 0.0
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        x = torch.randn(4, 2, 4, 4, generator=generator, dtype=next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if l1 or l2:
            loss = loss + weight_penalty(list(model.parameters()), l1=l1, l2=l2)
        loss.backward()
        optimizer.step()


def apart(first: nn.Module, second: nn.Module) -> float:
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("l1", "l2"), [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_equals_the_formula(l1: float, l2: float, dtype: torch.dtype) -> None:
    weights = [torch.randn(3, 2).to(dtype).requires_grad_(), torch.zeros(1, dtype=dtype)]
    weights[1].requires_grad_()
    penalty = weight_penalty(weights, l1=l1, l2=l2)
    w = weights[0].detach().double()
    expected = l1 * sum(abs(v) for v in w.flatten()) + 0.5 * l2 * sum(v * v for v in w.flatten())
    assert penalty.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(penalty.detach().double(), expected, rtol=1e-6, atol=0)
    penalty.backward()
    assert weights[0].grad is not None
    torch.testing.assert_close(weights[0].grad.double(), l1 * w.sign() + l2 * w, rtol=1e-2, atol=0)
    torch.testing.assert_close(weights[1].grad, torch.zeros(1, dtype=dtype))  # no NaN at 0


def test_gradcheck() -> None:
    weight = (torch.randn(3, 2, dtype=torch.float64) + 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda w: weight_penalty([w], l1=0.3, l2=0.2), weight)


def test_under_autocast_the_sum_is_float32() -> None:
    weight = torch.full((100, 100), 0.1, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        penalty = weight_penalty([weight], l1=1.0, l2=2.0)
    torch.testing.assert_close(penalty, torch.tensor(1100.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_l2_is_weight_decay_for_sgd(momentum: float) -> None:
    by_loss = make().double()
    by_decay = copy.deepcopy(by_loss)
    train(by_loss, torch.optim.SGD(by_loss.parameters(), lr=0.1, momentum=momentum), l2=0.05)
    sgd = torch.optim.SGD(by_decay.parameters(), lr=0.1, momentum=momentum, weight_decay=0.05)
    train(by_decay, sgd)
    assert apart(by_loss, by_decay) < 1e-14


def test_l2_is_weight_decay_for_adam_but_not_for_adamw() -> None:
    by_loss = make().double()
    adam, adamw = copy.deepcopy(by_loss), copy.deepcopy(by_loss)
    train(by_loss, torch.optim.Adam(by_loss.parameters(), lr=0.01), l2=0.05)
    train(adam, torch.optim.Adam(adam.parameters(), lr=0.01, weight_decay=0.05))
    train(adamw, torch.optim.AdamW(adamw.parameters(), lr=0.01, weight_decay=0.05))
    assert apart(by_loss, adam) < 1e-10
    assert apart(by_loss, adamw) > 1e-3


def lasso() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 10, generator=generator, dtype=torch.float64)
    truth = torch.tensor([2.0, -1.0] + [0.0] * 8, dtype=torch.float64)
    return x, x @ truth + 0.1 * torch.randn(64, generator=generator, dtype=torch.float64)


def test_only_the_proximal_step_gives_zeros_and_it_solves_the_lasso() -> None:
    x, y = lasso()
    l1, lr = 0.2, 0.5
    proximal = torch.ones(10, dtype=torch.float64, requires_grad=True)
    subgradient = torch.ones(10, dtype=torch.float64, requires_grad=True)
    for _ in range(80):
        for weight in (proximal, subgradient):
            loss = 0.5 * (x @ weight - y).square().mean()
            if weight is subgradient:
                loss = loss + weight_penalty([weight], l1=l1)
            (grad,) = torch.autograd.grad(loss, weight)
            with torch.no_grad():
                weight.sub_(lr * grad)
        soft_threshold([proximal], lr * l1)
    assert (proximal == 0).sum() == 8
    assert (subgradient == 0).sum() == 0
    # The conditions that an optimum of the lasso meets: gradient -l1 * sign(w), within l1 where w is 0.
    with torch.no_grad():
        grad = x.T @ (x @ proximal - y) / 64
    used = proximal != 0
    torch.testing.assert_close(grad[used], -l1 * proximal[used].detach().sign())
    assert (grad[~used].abs() <= l1).all()


def test_soft_threshold_equals_softshrink() -> None:
    weight = torch.randn(50, requires_grad=True)
    frozen = torch.ones(3)
    expected = torch.nn.functional.softshrink(weight.detach(), 0.3)
    soft_threshold([weight, weight, frozen], torch.tensor(0.3))
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(frozen, torch.ones(3))


def test_default_choice_is_the_matrices() -> None:
    model = make()
    model[4].weight.requires_grad_(True)
    assert [id(p) for p in penalized_parameters(model)] == [
        id(model[0].weight),
        id(model[4].weight),
    ]
    model[0].weight.requires_grad_(False)
    assert [id(p) for p in penalized_parameters(model)] == [id(model[4].weight)]
    attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
    chosen = {id(p) for p in penalized_parameters(attention)}
    assert chosen == {id(attention.in_proj_weight), id(attention.out_proj.weight)}


def test_patterns_and_ties() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    (tied,) = penalized_parameters(model, patterns=["1.weight"])
    assert tied is model[0].weight
    assert len(penalized_parameters(model)) == 1
    assert len(penalized_parameters(model, patterns=["*bias"])) == 2
    once, twice = (weight_penalty([model[0].weight] * n, l2=1.0) for n in (1, 2))
    torch.testing.assert_close(once, twice)


def test_frozen_weights_count_nothing() -> None:
    frozen, free = torch.ones(2), torch.ones(2, requires_grad=True)
    assert weight_penalty([frozen, free], l1=1.0) == 2
    assert weight_penalty([frozen], l1=1.0) == 0


def test_refusals() -> None:
    model = make()
    weights = list(model.parameters())
    with pytest.raises(ValueError, match="one above 0"):
        weight_penalty(weights)
    with pytest.raises(ValueError, match="at least 0"):
        weight_penalty(weights, l1=-1.0, l2=2.0)
    with pytest.raises(ValueError, match="pass a list"):
        weight_penalty(iter([]), l1=1.0)
    with pytest.raises(ValueError, match="pass a list"):
        soft_threshold([], 0.1)
    with pytest.raises(ValueError, match="at least 0"):
        soft_threshold(weights, -0.1)
    with pytest.raises(ValueError, match="none of the 1 tensors requires grad"):
        soft_threshold([torch.ones(3)], 0.1)
    with pytest.raises(ValueError, match="'head' matches none"):
        penalized_parameters(model, patterns=["head"])
    with pytest.raises(TypeError, match="one string"):
        penalized_parameters(model, patterns="*")
    with pytest.raises(ValueError, match="no shape yet"):
        penalized_parameters(nn.LazyLinear(2))
    with pytest.raises(ValueError, match="left to penalize"):
        penalized_parameters(nn.BatchNorm1d(3))
