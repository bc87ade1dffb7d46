"""Masks against brute force; training, checkpoints and the schedule of the paper."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.testing import assert_close

from flambeau.recipes.compress.prune_weights import WeightMasks, cubic_sparsity


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )  # fmt: skip


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(16, 3, 8, 8, generator=generator), torch.arange(16) % 4


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    x, y = batch()
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9])
def test_the_same_weights_as_torchs_global_pruning(sparsity: float) -> None:
    model, other = network(), network()
    masks = WeightMasks(model)
    masks.prune(sparsity)
    layers: Any = [(m, "weight") for m in other if isinstance(m, nn.Conv2d | nn.Linear)]
    torch_prune.global_unstructured(layers, torch_prune.L1Unstructured, amount=sparsity)
    for layer, name in layers:
        torch_prune.remove(layer, name)
    assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
    total = sum(mask.numel() for mask in masks.masks.values())
    assert masks.sparsity == pytest.approx(round(sparsity * total) / total)


@pytest.mark.parametrize(
    "kind",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
    ],
)
def test_zeros_stay_and_the_rest_trains(kind: Any) -> None:
    model = network()
    optimizer = kind(model.parameters())
    masks = WeightMasks(model)
    train(model, optimizer, 2)  # momentum of the weights that go
    masks.prune(0.8)
    handle = masks.attach(optimizer)
    before = {name: mask.clone() for name, mask in masks.masks.items()}
    losses = train(model, optimizer, 15)
    assert losses[-1] < losses[0]
    for name, mask in before.items():
        weight = model.get_parameter(name)
        assert weight[~mask].eq(0).all()
        assert weight[mask].ne(0).all()
    handle.remove()
    train(model, optimizer, 1)
    assert any(model.get_parameter(name)[~mask].ne(0).any() for name, mask in before.items())


def test_a_checkpoint_is_that_of_a_plain_model(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    masks = WeightMasks(model)
    masks.prune(0.7)
    masks.attach(optimizer)
    train(model, optimizer, 3)
    state = {"model": model, "optimizer": optimizer, "masks": masks}
    torch.save({name: part.state_dict() for name, part in state.items()}, tmp_path / "c.pt")
    expected = train(model, optimizer, 3)

    plain = network()
    saved = torch.load(tmp_path / "c.pt")
    plain.load_state_dict(saved["model"])
    assert plain.get_parameter("5.weight").eq(0).float().mean() > 0.5

    again = network()
    optimizer = torch.optim.Adam(again.parameters(), lr=0.01)
    masks = WeightMasks(again)
    masks.attach(optimizer)
    for name, part in {"model": again, "optimizer": optimizer, "masks": masks}.items():
        part.load_state_dict(saved[name])
    assert train(again, optimizer, 3) == expected
    assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_gradually_what_is_gone_stays_gone() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks = WeightMasks(model)
    masks.attach(optimizer)
    gone: dict[str, Tensor] = {}
    for step in range(11):
        sparsity = cubic_sparsity(step, final=0.9, first_step=0, last_step=10)
        masks.prune(sparsity)
        assert masks.sparsity == pytest.approx(sparsity, abs=0.001)
        for name, mask in masks.masks.items():
            assert not (gone.get(name, torch.tensor(False)) & mask).any()
            gone[name] = ~mask
        train(model, optimizer, 1)
    assert masks.sparsity == pytest.approx(0.9, abs=0.001)
    masks.prune(0.2)
    assert masks.sparsity == pytest.approx(0.9, abs=0.001)


def test_the_schedule_of_the_paper() -> None:
    """s_t = s_f + (s_i - s_f) (1 - (t - t0) / (n dt))^3."""
    settings: Any = {"final": 0.9, "initial": 0.1, "first_step": 20, "last_step": 120}
    for step in range(20, 121):
        expected = 0.9 + (0.1 - 0.9) * (1 - (step - 20) / 100) ** 3
        assert cubic_sparsity(step, **settings) == pytest.approx(expected, abs=1e-12)
    assert cubic_sparsity(0, **settings) == pytest.approx(0.1)
    assert cubic_sparsity(999, **settings) == 0.9


def test_two_of_four_by_brute_force() -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    masks = WeightMasks(model)
    assert masks.prune_pattern() == ["3.weight", "5.weight"]  # 3 inputs cannot be cut into fours
    assert masks.masks["0.weight"].all()
    conv, linear = model.get_parameter("3.weight"), model.get_parameter("5.weight")
    for out in range(8):
        for place in ((i, j) for i in range(3) for j in range(3)):
            for start in (0, 4):
                group = before["3.weight"][out, start : start + 4, place[0], place[1]]
                low = group.abs().sort().values[1]
                expected = torch.where(group.abs() > low, group, 0.0)
                assert conv[out, start : start + 4, place[0], place[1]].equal(expected)
    assert linear.view(4, -1, 4).ne(0).sum(2).eq(2).all()
    assert masks.sparsity == pytest.approx((288 + 256) / (216 + 576 + 512))


def test_one_of_eight() -> None:
    layer = nn.Linear(16, 3)
    WeightMasks(layer).prune_pattern(1, 8)
    assert layer.weight.view(3, 2, 8).ne(0).sum(2).eq(1).all()


def test_ties_and_not_a_number() -> None:
    layer = nn.Linear(8, 1, bias=False)
    nn.init.ones_(layer.weight)
    masks = WeightMasks(layer)
    masks.prune(0.5)
    assert layer.weight.eq(0).sum() == 4
    with torch.no_grad():
        layer.weight[~masks.masks["weight"]] = torch.nan
    masks.apply()
    assert layer.weight.eq(0).sum() == 4


def test_refusals() -> None:
    masks = WeightMasks(network())
    for wrong in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\)"):
            masks.prune(wrong)
    with pytest.raises(ValueError, match="got 4 of 4"):
        masks.prune_pattern(4, 4)
    with pytest.raises(ValueError, match="no parameter 9"):
        WeightMasks(network(), names=["9"])
    with pytest.raises(ValueError, match="no weights of convolutions"):
        WeightMasks(nn.ReLU())
    with pytest.raises(
        ValueError, match=r"of another model: 0\.weight, 3\.weight, 5\.weight, weight"
    ):
        masks.load_state_dict(WeightMasks(nn.Linear(2, 2)).state_dict())
    with pytest.raises(ValueError, match="parts are in"):
        cubic_sparsity(0, final=1.0, first_step=0, last_step=1)
    with pytest.raises(ValueError, match="first_step is before"):
        cubic_sparsity(0, final=0.5, first_step=1, last_step=1)


def test_a_pattern_keeps_what_was_pruned_before() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(16, 4, bias=False)
    masks = WeightMasks(layer)
    masks.prune(0.7)
    gone = ~masks.masks["weight"]
    masks.prune_pattern()
    assert not masks.masks["weight"][gone].any()
    assert masks.masks["weight"].view(4, 4, 4).sum(2).max() <= 2
    with torch.no_grad():
        layer.weight += 1  # as an optimizer would
    masks.apply()
    assert not layer.weight[gone].any()


@pytest.mark.parametrize("groups", [1, 2])
def test_the_inputs_of_a_transposed_convolution_are_its_first_dimension(groups: int) -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(8, 6, 3, groups=groups, bias=False)
    masks = WeightMasks(layer)
    assert masks.prune_pattern() == ["weight"]
    kept = layer.weight.detach().ne(0)  # (in, out / groups, 3, 3)
    assert kept.unfold(0, 4, 4).sum(-1).eq(2).all()
    narrow = nn.ConvTranspose2d(8, 8, 3, groups=4)  # two inputs per group
    assert WeightMasks(narrow).prune_pattern() == []


def test_one_string_is_not_a_list_of_names() -> None:
    with pytest.raises(TypeError, match=r"\['weight'\]"):
        WeightMasks(nn.Linear(2, 2), names="weight")


def test_float64_weights_are_compared_in_float64() -> None:
    """In float32 these four are equal, and the largest went."""
    model = nn.Linear(4, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(1 + torch.tensor([[1e-12, 0.0, 3e-12, 2e-12]], dtype=torch.float64))
    WeightMasks(model).prune(0.5)
    assert (model.weight != 0).tolist() == [[False, False, True, True]]
