from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import nn

from flambeau.recipes.models.param_groups import param_groups


def names(
    model: nn.Module, *, weight_decay: float = 0.1, no_decay: Collection[str] = ()
) -> tuple[set[str], set[str]]:
    """Names with and without decay; every trainable parameter must be there, once."""
    groups = param_groups(model, weight_decay=weight_decay, no_decay=no_decay)
    listed = [id(parameter) for group in groups for parameter in group["params"]]
    trainable = {id(p) for p in model.parameters() if p.requires_grad}
    assert len(listed) == len(set(listed))
    assert set(listed) == trainable
    assert all(group["params"] for group in groups)
    torch.optim.SGD(groups, lr=0.1)  # warns of a parameter that is listed twice
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    sides: dict[float, set[str]] = {weight_decay: set(), 0.0: set()}
    for group in groups:
        sides[group["weight_decay"]] |= {name_of[id(p)] for p in group["params"]}
    return sides[weight_decay], sides[0.0]


class Block(nn.Module):
    """What a vision transformer is made of, with every way of owning a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 4))
        self.position = nn.Embedding(3, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.scale = nn.Parameter(torch.ones(()))
        self.mlp = nn.Linear(4, 4)


def test_transformer_block() -> None:
    decayed, spared = names(Block())
    assert decayed == {
        "cls_token",
        "position.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "mlp.weight",
    }
    assert spared == {
        "norm.weight",
        "norm.bias",
        "attention.in_proj_bias",
        "attention.bias_k",  # of three dimensions
        "attention.bias_v",
        "attention.out_proj.bias",
        "scale",
        "mlp.bias",
    }


def test_lstm() -> None:
    decayed, spared = names(nn.LSTM(2, 3, num_layers=2))
    assert decayed == {f"weight_{kind}_l{layer}" for kind in ("ih", "hh") for layer in (0, 1)}
    assert spared == {f"bias_{kind}_l{layer}" for kind in ("ih", "hh") for layer in (0, 1)}


def test_norms_of_several_dimensions() -> None:
    model = nn.Sequential(nn.LayerNorm((2, 3)), nn.RMSNorm((2, 3)), nn.Linear(3, 3, bias=False))
    assert names(model) == ({"2.weight"}, {"0.weight", "0.bias", "1.weight"})


def test_norm_without_parameters() -> None:
    """Grouping by module type raises TypeError here."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, affine=False))
    assert names(model) == ({"0.weight"}, {"0.bias"})


def test_empty_groups_are_left_out() -> None:
    only_weights = param_groups(nn.Linear(2, 2, bias=False), weight_decay=0.1)
    assert [group["weight_decay"] for group in only_weights] == [0.1]
    only_norms = param_groups(nn.BatchNorm1d(2), weight_decay=0.1)
    assert [group["weight_decay"] for group in only_norms] == [0.0]


def test_without_decay_there_is_one_group_in_the_order_of_the_model() -> None:
    model = Block()
    (group,) = param_groups(model, weight_decay=0.0)
    assert [id(p) for p in group["params"]] == [id(p) for p in model.parameters()]


def test_tied_weights_are_listed_once_and_one_name_is_enough() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    assert names(model) == ({"embed.weight"}, set())
    # 'head.weight' is the name that `named_parameters` does not list.
    assert names(model, no_decay=["head.*"]) == (set(), {"embed.weight"})


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    assert names(model) == ({"1.weight"}, {"1.bias"})


def test_patterns() -> None:
    model = Block()
    assert names(model, no_decay=["cls_token", "posit*"])[0] == {
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "mlp.weight",
    }
    assert names(model, no_decay=("*.weight",))[0] == {"cls_token", "attention.in_proj_weight"}


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(2, 2))
        self.mix = nn.Parameter(torch.zeros(2, 2))

    def no_weight_decay(self) -> set[str]:
        return {"pos*", "a name that this variant lacks"}


def test_the_models_own_choice_counts_also_inside_of_a_wrapper() -> None:
    assert names(Own()) == ({"mix"}, {"position"})
    assert names(nn.Sequential(Own(), Own())) == ({"0.mix", "1.mix"}, {"0.position", "1.position"})


@pytest.mark.parametrize(
    "name",
    ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "beit_base_patch16_224", "resnet18"],
)
def test_same_groups_as_timm(name: str) -> None:
    import timm
    from timm.optim import param_groups_weight_decay

    with torch.device("meta"):
        model = timm.create_model(name)
    own = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs: list[dict[str, Any]] = param_groups_weight_decay(model, 0.05, no_weight_decay_list=own)
    expected = {group["weight_decay"]: {id(p) for p in group["params"]} for group in theirs}
    groups = param_groups(model, weight_decay=0.05)
    assert {g["weight_decay"]: {id(p) for p in g["params"]} for g in groups} == expected


def test_step_decays_weights_alone() -> None:
    """Without gradients, one SGD step multiplies decayed weights by 1 - lr * decay and no others."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    nn.init.ones_(model[0].bias)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    torch.optim.SGD(param_groups(model, weight_decay=0.5), lr=0.1).step()
    for name, p in model.named_parameters():
        factor = 0.95 if name == "0.weight" else 1.0
        torch.testing.assert_close(p.detach(), factor * before[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("no_decay", "weight_decay", "error", "message"),
    [
        (
            ["*embed*"],
            0.1,
            ValueError,
            "'\\*embed\\*' matches none of the model's 2 parameter names",
        ),
        (["BIAS"], 0.1, ValueError, "'BIAS' matches none"),
        ("bias", 0.1, TypeError, r"got one string: \['bias'\]"),
        ([], -0.1, ValueError, "weight_decay must be at least 0, got -0.1"),
        ([], float("nan"), ValueError, "weight_decay must be at least 0, got nan"),
    ],
)
def test_refused(
    no_decay: Collection[str], weight_decay: float, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        param_groups(nn.Linear(2, 2), weight_decay=weight_decay, no_decay=no_decay)


def test_model_without_trainable_parameters_is_refused() -> None:
    for model in (nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)):
        with pytest.raises(ValueError, match="no parameter of the model is trainable"):
            param_groups(model, weight_decay=0.1)


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="weight has no shape yet: run one batch"):
        param_groups(nn.LazyLinear(3), weight_decay=0.1)
