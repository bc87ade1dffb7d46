from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.models.layer_decay import group_table, layer_depths, layerwise_lr


def plain(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def rates(model: nn.Module, groups: list[dict[str, Any]], key: str = "lr") -> dict[str, float]:
    """{name: rate}; every trainable parameter must be there, once."""
    listed = [id(p) for group in groups for p in group["params"]]
    assert sorted(listed) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    names = {id(p): name for name, p in model.named_parameters()}
    return {names[id(p)]: group[key] for group in groups for p in group["params"]}


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 2)
    )


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_same_rates_and_decays_as_timm(name: str) -> None:
    import timm
    from timm.optim import param_groups_layer_decay

    with torch.device("meta"):
        model = timm.create_model(name, num_classes=10)
    own = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_layer_decay(model, 0.05, own, layer_decay=0.75)
    decays: list[dict[str, Any]] = [{"params": [], "weight_decay": wd} for wd in (0.05, 0.0)]
    for group in theirs:
        decays[group["weight_decay"] == 0]["params"] += group["params"]
    groups = layerwise_lr(decays, model, lr=2e-3, layer_decay=0.75)
    assert rates(model, groups, "weight_decay") == rates(model, theirs, "weight_decay")
    scales = rates(model, theirs, "lr_scale")
    assert rates(model, groups) == pytest.approx({n: 2e-3 * scale for n, scale in scales.items()})


def test_structure_gives_what_timm_knows_of_a_resnet() -> None:
    """torchvision's ResNet has the names of timm's, and no `group_matcher`."""
    import timm
    import torchvision

    with torch.device("meta"):
        known = timm.create_model("resnet18")
        model = torchvision.models.resnet18()
    assert layer_depths(model) == layer_depths(known)
    assert max(layer_depths(model).values()) == 9


def test_structure_of_a_vit_is_that_of_beit() -> None:
    """BEiT: embeddings are layer 0, block k is layer k + 1, the head is the last."""
    from torchvision.models import VisionTransformer

    model = VisionTransformer(8, 4, num_layers=3, num_heads=1, hidden_dim=4, mlp_dim=4)
    depths = layer_depths(model)
    for name, depth in depths.items():
        if "encoder_layer_" in name:
            assert depth == int(name.split("encoder_layer_")[1][0]) + 1
        else:
            assert depth == {"encoder.ln": 3, "heads.head": 4}.get(name.rpartition(".")[0], 0)


@pytest.mark.parametrize(
    ("name", "num_layers"),
    [
        ("vgg11_bn", 11),  # weight layers, as its name says
        (
            "mobilenet_v2",
            20,
        ),  # paper, table 2: 17 bottlenecks, the convolutions around them, the head
        ("efficientnet_b0", 19),  # paper, table 1: 16 blocks, 2 convolutions, the head
    ],
)
def test_depth_of_the_papers(name: str, num_layers: int) -> None:
    import torchvision

    with torch.device("meta"):
        depths = layer_depths(torchvision.models.get_model(name))
    assert sorted(set(depths.values())) == list(range(num_layers))
    assert list(depths.values()) == sorted(depths.values())


def test_embeddings_are_layer_0_also_where_tied() -> None:
    model = nn.ModuleDict({"word": nn.Embedding(5, 4), "place": nn.Embedding(3, 4)})
    model["body"] = nn.Linear(4, 4)
    model["head"] = nn.Linear(4, 5, bias=False)
    model["head"].weight = model["word"].weight
    groups = layerwise_lr(plain(model), model, lr=1.0, layer_decay=0.1)
    assert rates(model, groups) == pytest.approx(
        {"word.weight": 0.1, "place.weight": 0.1, "body.weight": 0.1, "body.bias": 0.1}
    )


def test_equal_rates_are_one_group() -> None:
    """Two rates and two decays are four groups; a fused step costs as much as it has groups."""
    import torchvision

    with torch.device("meta"):
        model = torchvision.models.resnet18()
    decays = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = layerwise_lr(decays, model, lr=0.01, head=["fc.*"], head_lr=0.1)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("layers 0-9", 0.01, 0.05), ("head", 0.1, 0.05), ("layers 0-9", 0.01, 0.0), ("head", 0.1, 0.0),
    ]  # fmt: skip
    expected = {n: 0.1 if n.startswith("fc") else 0.01 for n, _ in model.named_parameters()}
    assert rates(model, groups) == expected
    assert len(layerwise_lr(decays, model, lr=0.01, layer_decay=0.5)) == 20


def test_two_rates() -> None:
    """Small for the trunk, large for the head; the key of a group is 'params'."""
    model = stack()
    groups = layerwise_lr(plain(model), model, lr=0.01, head=["4.*"], head_lr=0.1)
    expected = {name: 0.1 if name[0] == "4" else 0.01 for name, _ in model.named_parameters()}
    assert rates(model, groups) == expected
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=99.0)  # overruled by each group
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old - expected[name])


def test_groups_keep_what_they_hold() -> None:
    model = stack()
    groups = [
        {"params": [model[0].weight, model[2].weight], "weight_decay": 0.5, "momentum": 0.8},
        {"params": [model[4].weight], "lr": 4.0},
        {"params": model[2].bias},
    ]
    parts = layerwise_lr(groups, model, lr=1.0, layer_decay=0.5, head=["0.weight"], head_lr=7.0)
    assert [
        (part["name"], part["lr"], part.get("weight_decay"), part.get("momentum")) for part in parts
    ] == [
        ("layer 1", 0.5, 0.5, 0.8),
        ("head", 7.0, 0.5, 0.8),
        ("layer 2", 4.0, None, None),
        ("layer 1", 0.5, None, None),
    ]
    assert groups[1] == {"params": [model[4].weight], "lr": 4.0}  # the input is left alone


def test_frozen_parameters_stay_out_and_lost_ones_are_shown() -> None:
    """Groups by module type lose what is no Linear, Conv or BatchNorm."""
    model = stack()
    model[0].requires_grad_(False)
    groups = layerwise_lr(plain(model), model, lr=1.0, layer_decay=0.5)
    assert not {"0.weight", "0.bias"} & set(rates(model, groups))
    assert group_table(groups, model).splitlines() == [
        "group      tensors  parameters        lr weight_decay  first",
        "layer 0          2           8      0.25            -  1.weight",
        "layer 1          2         148       0.5            -  2.weight",
        "layer 2          2          10         1            -  4.weight",
    ]
    by_note = {"params": [p for m in model if isinstance(m, nn.Linear) for p in m.parameters()]}
    lost, twice = group_table([by_note, by_note], model).splitlines()[-2:]
    assert lost == "in no group: 1.weight, 1.bias, 2.weight, 2.bias"
    assert twice == "in several groups: 4.weight, 4.bias"


def test_schedules_keep_the_proportion() -> None:
    from flambeau.recipes.training.schedules import cosine, set_lr

    model = stack()
    make = lambda: layerwise_lr(plain(model), model, lr=1.0, layer_decay=0.5)  # noqa: E731
    ours, torchs = torch.optim.SGD(make()), torch.optim.SGD(make())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(torchs, T_max=10)
    for step in range(10):
        set_lr(ours, cosine(step, total_steps=10))
        ours_now, torchs_now = ([g["lr"] for g in o.param_groups] for o in (ours, torchs))
        assert ours_now == pytest.approx(torchs_now)
        assert ours_now[0] == pytest.approx(ours_now[2] / 4)
        torchs.step()
        scheduler.step()
    restored = torch.optim.SGD(make())
    restored.load_state_dict(ours.state_dict())
    assert [g["lr"] for g in restored.param_groups] == ours_now
    assert group_table(restored.param_groups, model).count("layer") == 3


def test_depths_of_ones_own() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 1)
            self.trunk = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.trunk(x))

    model = Backwards()
    depths = {"trunk.weight": 0, "trunk.bias": 0, "head.weight": 1}  # head.bias: as the deepest
    groups = layerwise_lr(plain(model), model, lr=1.0, layer_decay=0.5, depths=depths)
    assert rates(model, groups) == {
        name: 0.5 if name.startswith("trunk") else 1.0 for name, _ in model.named_parameters()
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr and head_lr must be at least 0, layer_decay .* got -1.0, None and 1.0"),
        ({"layer_decay": 0.0}, "got 1.0, None and 0.0"),
        ({"layer_decay": 1.5}, "got 1.0, None and 1.5"),
        ({"head": ["4.*"], "head_lr": -0.1}, "got 1.0, -0.1 and 1.0"),
        ({"head": ["4.*"], "head_lr": float("nan")}, "got 1.0, nan and 1.0"),
        ({"head": ["4.*"]}, "together only: give both or none"),
        ({"head_lr": 0.1}, "together only: give both or none"),
        ({"head": ["fc.*"], "head_lr": 0.1}, r"head: 'fc\.\*' matches none"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    model = stack()
    with pytest.raises(ValueError, match=message):
        layerwise_lr(plain(model), model, **{"lr": 1.0, **settings})


def test_a_single_string_is_refused() -> None:
    with pytest.raises(TypeError, match=r"got one string: \['4\.\*'\]"):
        layerwise_lr(plain(stack()), stack(), lr=1.0, head="4.*", head_lr=0.1)


def test_table_of_an_empty_group_and_of_another_model() -> None:
    groups = [{"params": []}, {"params": [nn.Parameter(torch.ones(3))], "lr": 0.1}]
    empty, other = group_table(groups, stack()).splitlines()[1:3]
    assert empty.split() == ["0", "0", "0", "-", "-", "-"]
    assert other.split()[:4] == ["1", "1", "3", "0.1"]
    assert other.endswith("of another model")


def test_refused_models() -> None:
    with pytest.raises(ValueError, match="no effect: the whole model is one layer"):
        layerwise_lr(plain(nn.Linear(2, 2)), nn.Linear(2, 2), lr=1.0, layer_decay=0.5)
    with pytest.raises(ValueError, match=r"not of this model: a parameter of \[2, 2\]"):
        layerwise_lr(plain(nn.Linear(2, 2)), stack(), lr=1.0)


def test_further_names_of_a_layer_do_not_move_it() -> None:
    first, twice, last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(first, twice, twice, last)
    assert list(layer_depths(model).values()) == [0, 0, 1, 1, 1, 1, 2, 2]
    model.layers = nn.ModuleList([first, twice])
    got = layerwise_lr(plain(model), model, lr=1.0, layer_decay=0.5)
    assert [group["lr"] for group in got] == [0.25, 0.5, 1.0]
    assert got[1]["params"] == list(twice.parameters())
