"""Pruned networks against the original with the same channels silenced, which this file does by itself."""

import copy
import json
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from flambeau.recipes.compress.prune_channels import apply_plan, prune_channels

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def trained(model: Any) -> Any:
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, NORMS):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return model.eval()


def noise(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


def num_flops(model: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    return counter.get_total_flops()


def num_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def silenced(model: nn.Module, pruned: nn.Module, plan: Any) -> nn.Module:
    """The original, in which each pruned channel is 0 behind its layer and its BatchNorm.

    The same as cutting it out where only ReLU (0 to 0), pooling, sums and concatenation follow.
    """
    model = copy.deepcopy(model)
    for name, kept in plan.items():
        layer: Any = model.get_submodule(name)
        if "out" in kept:
            gone = [c for c in range(len(layer.weight)) if c not in kept["out"]]
            with torch.no_grad():
                layer.weight[gone] = 0
                if layer.bias is not None:
                    layer.bias[gone] = 0
    return model


def check(model: nn.Module, size: int = 64, amount: float = 0.5, **settings: Any) -> Any:
    trained(model)
    x = noise(2, 3, size, size)
    before = copy.deepcopy(model.state_dict())
    pruned, plan, left = prune_channels(model, x[:1], amount=amount, **settings)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert type(pruned) is type(model)
    expected = silenced(model, pruned, plan).double()
    with torch.no_grad():
        outputs = expected(x.double())
        assert float(outputs.std()) > 1e-6
        got = copy.deepcopy(pruned).double()(x.double())
        assert_close(got, outputs, rtol=1e-8, atol=1e-9 * float(outputs.abs().max()))
    assert num_flops(pruned, x) < num_flops(model, x)
    return pruned, plan, left


# A chain of blocks, all of whose inner activations keep 0 at 0: amounts of what is left of weights and FLOPs.
RELU_NETS = [
    ("resnet18", 0.3, 0.3), ("resnet50", 0.3, 0.3), ("mobilenet_v2", 0.45, 0.5), ("densenet121", 0.35, 0.35),
    ("vgg11_bn", 0.3, 0.3), ("regnet_x_400mf", 0.5, 0.55),
]  # fmt: skip
FAST = ("resnet18", "mobilenet_v2", "densenet121")


@pytest.mark.parametrize(
    ("name", "weights", "flops"),
    [pytest.param(*row, marks=() if row[0] in FAST else pytest.mark.slow) for row in RELU_NETS],
)
def test_networks_of_torchvision(name: str, weights: float, flops: float) -> None:
    model = torchvision.models.get_model(name, num_classes=10)
    pruned, plan, left = check(model)
    assert num_parameters(pruned) < weights * num_parameters(model)
    x = noise(1, 3, 64, 64)
    assert num_flops(pruned, x) < flops * num_flops(model, x)
    assert len(left) == 1  # the last layer
    assert plan  # and every other layer has lost channels
    layers = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert all(n in plan for n in layers)


@pytest.mark.parametrize(
    "name",
    [
        "resnet26d",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "vovnet39a",
                "dla34",
                "selecsls42b",
                "repvgg_a0",
                "inception_v4",
                "resnetv2_50",
            )
        ),
    ],
)
def test_networks_of_timm(name: str) -> None:
    model = timm.create_model(name, num_classes=10)
    pruned, _, left = check(model, 96 if name == "inception_v4" else 64)
    assert num_parameters(pruned) < 0.35 * num_parameters(model)
    assert len(left) == 1


def consumers_silenced(model: nn.Module, plan: Any) -> nn.Module:
    """The original, in which nothing reads the channels that are gone; right for every activation."""
    model = copy.deepcopy(model)
    for name, kept in plan.items():
        layer: Any = dict(model.named_modules()).get(name)  # None: a parameter
        if "in" in kept and getattr(layer, "groups", 1) == 1:
            gone = [c for c in range(layer.weight.shape[1]) if c not in kept["in"]]
            with torch.no_grad():
                layer.weight[:, gone] = 0
    return model


@pytest.mark.parametrize(
    ("library", "name", "size"),
    [
        ("torchvision", "mobilenet_v3_small", 64),  # squeeze and excitation, hardswish
        ("torchvision", "shufflenet_v2_x0_5", 64),  # halves, and channels in another order
        ("timm", "tf_efficientnet_b0", 64),
        pytest.param("torchvision", "regnet_y_400mf", 64, marks=pytest.mark.slow),
        pytest.param("torchvision", "efficientnet_b0", 64, marks=pytest.mark.slow),
        pytest.param("torchvision", "googlenet", 64, marks=pytest.mark.slow),
        pytest.param("timm", "ghostnet_100", 64, marks=pytest.mark.slow),
        pytest.param("timm", "skresnet18", 64, marks=pytest.mark.slow),
        pytest.param("timm", "res2net50_26w_4s", 64, marks=pytest.mark.slow),
        pytest.param("timm", "hrnet_w18_small", 64, marks=pytest.mark.slow),
        pytest.param("timm", "fastvit_t8", 64, marks=pytest.mark.slow),
    ],
)
def test_networks_with_other_activations(library: str, name: str, size: int) -> None:
    if library == "timm":
        model = timm.create_model(name, num_classes=10)
    else:
        settings = {"init_weights": False} if name == "googlenet" else {}
        model = torchvision.models.get_model(name, num_classes=10, **settings)
    trained(model)
    x = noise(2, 3, size, size).double()
    pruned, plan, _ = prune_channels(model, x[:1].float(), amount=0.5)
    assert num_parameters(pruned) < num_parameters(model)
    with torch.no_grad():
        expected = consumers_silenced(model, plan).double()(x)
        assert float(expected.std()) > 1e-6
        got = copy.deepcopy(pruned).double()(x)
        assert_close(got, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))


# ---------------------------------------------------------------- which channels


def weighted(layer: Any, sizes: list[float]) -> Any:
    """Each output channel of a norm that the test chooses, of one sign."""
    with torch.no_grad():
        for channel, size in enumerate(sizes):
            layer.weight[channel] = size
    return layer


def test_the_smallest_norms_go() -> None:
    model = nn.Sequential(
        weighted(nn.Conv2d(3, 4, 1), [4, 1, 3, 2]), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    plan = prune_channels(model, noise(1, 3, 4, 4), amount=0.5).plan
    assert plan == {"0": {"out": [0, 2]}, "2": {"in": [0, 2]}}


def test_l1_and_l2_disagree_where_they_should() -> None:
    """(3, 0) has the larger L2 norm, (2, 2) the larger L1 norm."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].weight.data = torch.tensor([[3.0, 0.0], [2.0, 2.0]])  # L1: 3, 4; L2: 3, 2.83
    x = noise(1, 2)
    assert prune_channels(model, x, amount=0.5, criterion="l1").plan["0"] == {"out": [1]}
    assert prune_channels(model, x, amount=0.5, criterion="l2").plan["0"] == {"out": [0]}


def test_weights_of_batchnorm() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)
    ).eval()
    model[1].weight.data = torch.tensor([0.1, -3.0, 2.0, -0.2])
    plan = prune_channels(model, noise(1, 3, 4, 4), amount=0.5, criterion="bn").plan
    assert plan["1"] == {"out": [1, 2]}


def test_globally_takes_more_from_the_layer_with_more_small_channels() -> None:
    model = nn.Sequential(
        weighted(nn.Linear(3, 4), [10, 0.1, 0.1, 0.1]),
        weighted(nn.Linear(4, 4), [1, 1, 1, 1]),
        nn.Linear(4, 2),
    )
    plan = prune_channels(model, noise(1, 3), amount=0.375, globally=True).plan
    assert plan == {"0": {"out": [0]}, "1": {"in": [0]}}
    each = prune_channels(model, noise(1, 3), amount=0.5).plan
    assert [len(each[name]["out"]) for name in ("0", "1")] == [2, 2]


def test_an_amount_for_each_layer_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    plan = prune_channels(model, noise(1, 3), amount={"0": 0.25}).plan
    assert [len(plan["0"]["out"]), len(plan["1"]["in"]), "2" in plan] == [6, 6, False]


def test_one_channel_stays() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    assert prune_channels(model, noise(1, 3), amount=0.99).plan["0"] == {
        "out": prune_channels(model, noise(1, 3), amount=0.75).plan["0"]["out"]
    }


class Residual(nn.Module):
    """Groups, transposed convolutions, PReLU, a scale per channel, a sum, a hard-coded flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2)
        self.down = nn.ConvTranspose2d(8, 6, 1)
        self.act = nn.PReLU(8)
        self.gamma = nn.Parameter(torch.rand(8, 1, 1))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, double: bool = False) -> Tensor:
        x = self.act(self.a(x))
        x = x + self.gamma * self.b(x)
        x = self.down(self.up(2 * x if double else x)).relu()
        return self.head(x.mean((2, 3)))


def test_groups_parameters_and_arguments() -> None:
    torch.manual_seed(0)
    model = Residual().double()
    x = noise(2, 3, 6, 6).double()
    for example in ((x,), (x, True)):
        pruned, plan, left = prune_channels(model, *example, amount=0.5)
        assert left.keys() == {"head"}
        layers: Any = dict(pruned.named_modules())
        assert (layers["b"].groups, layers["up"].groups, layers["down"].out_channels) == (2, 1, 3)
        assert (layers["act"].num_parameters, tuple(pruned.get_parameter("gamma").shape)) == (
            4,
            (4, 1, 1),
        )
        masked = copy.deepcopy(model)
        with torch.no_grad():
            for name in ("down", "head"):
                layer: Any = masked.get_submodule(name)
                read = layer.weight if name == "down" else layer.weight.T
                read[[c for c in range(len(read)) if c not in plan[name]["in"]]] = 0
        assert_close(pruned(*example), masked(*example), rtol=0, atol=1e-10)


def test_the_plan_makes_a_fresh_model_ready_for_the_checkpoint() -> None:
    model = trained(torchvision.models.mobilenet_v3_small(num_classes=5))
    pruned, plan, _ = prune_channels(model, noise(1, 3, 32, 32), amount=0.3)
    plan = json.loads(json.dumps(plan))
    fresh = apply_plan(torchvision.models.mobilenet_v3_small(num_classes=5), plan)
    fresh.load_state_dict(pruned.state_dict())
    x = noise(2, 3, 32, 32)
    assert_close(fresh.eval()(x), pruned(x), rtol=0, atol=0)


def test_training_goes_on() -> None:
    model = trained(torchvision.models.resnet18(num_classes=3))
    pruned = prune_channels(model, noise(1, 3, 32, 32), amount=0.8).model.train()
    optimizer = torch.optim.SGD(pruned.parameters(), lr=0.05)
    x, y = noise(6, 3, 32, 32), torch.arange(6) % 3
    losses = []
    for _ in range(6):
        loss = nn.functional.cross_entropy(pruned(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# ---------------------------------------------------------------- what is left


class Net(nn.Module):
    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Conv2d(3, 8, 1),
            nn.Conv2d(8, 8, 1),
            nn.Conv2d(8, 2, 1),
        )
        self.norm, self.linear = nn.LayerNorm([4, 4]), nn.Linear(8 * 16, 3)
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


LEFT = [  # forward, and the reason why 'first' stays
    (lambda m, x: m.last(m.first(x).softmax(1)), "softmax: softmax sees all channels at once"),
    (lambda m, x: m.last(m.norm(m.first(x))), "norm: LayerNorm sees all channels at once"),
    (lambda m, x: m.linear(m.first(x).view(-1, 128)), "first: all its channels go together"),
    (lambda m, x: m.last(m.first(x)[:, [1, 0, 2, 3, 4, 5, 6, 7]]), "getitem: getitem at an index"),
    (lambda m, x: m.first(x)[:, :4].mean(), "getitem: getitem at an index"),
    (lambda m, x: m.last(torch.cat(m.first(x).split(4, 1), 1)), "split: split at an index"),
    (lambda m, x: m.last(m.first(x) @ x.new_ones(4, 4)), "matmul: matmul sees all channels"),
    (lambda m, x: m.last(m.first(x)) + m.first.weight.sum(), "first: forward reads its weights"),
]


@pytest.mark.parametrize(("forward", "reason"), LEFT)
def test_what_cannot_lose_channels_is_left(forward: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="no channel can be removed") as caught:
        prune_channels(Net(forward), noise(1, 3, 4, 4), amount=0.5)
    assert reason in str(caught.value)


def test_the_rest_is_pruned_all_the_same() -> None:
    model = Net(lambda m, x: m.last(m.second(m.first(x)).softmax(1)))
    _, plan, left = prune_channels(model, noise(1, 3, 4, 4), amount=0.5)
    assert plan.keys() == {"first", "second"}
    assert left["second"] == "softmax: softmax sees all channels at once, or is not known"


def test_flatten_takes_the_columns_of_each_channel() -> None:
    model = Net(lambda m, x: m.linear(m.first(x).flatten(1)))
    plan = prune_channels(model, noise(1, 3, 4, 4), amount=0.5).plan
    kept = plan["first"]["out"]
    assert plan["linear"]["in"] == [16 * channel + i for channel in kept for i in range(16)]


def test_a_transformer_loses_hidden_width_alone() -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, depth=2, img_size=32)
    _, plan, left = prune_channels(model, noise(1, 3, 32, 32), amount=0.5)
    assert plan.keys() == {f"blocks.{i}.mlp.fc{j}" for i in (0, 1) for j in (1, 2)}
    assert "patch_embed.proj" in left
    assert "blocks.0.attn.qkv" in left


def test_refusals() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), noise(1, 3)
    for amount in (0.0, 1.0, {"0": 2.0}):
        with pytest.raises(ValueError, match=r"an amount is in \(0, 1\)"):
            prune_channels(model, x, amount=amount)
    with pytest.raises(ValueError, match=r"'1' cannot be pruned: output: the outputs"):
        prune_channels(model, x, amount={"1": 0.5})
    with pytest.raises(ValueError, match=r"'7' cannot be pruned: there is no such layer"):
        prune_channels(model, x, amount={"7": 0.5})
    with pytest.raises(ValueError, match="takes one amount"):
        prune_channels(model, x, amount={"0": 0.5}, globally=True)
    with pytest.raises(ValueError, match=r"no channel can be removed: .*have no BatchNorm"):
        prune_channels(model, x, amount=0.5, criterion="bn")
    with pytest.raises(ValueError, match="criterion is"):
        prune_channels(model, x, amount=0.5, criterion="l3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the plan does not fit Sequential at '5'"):
        apply_plan(model, {"5": {"out": [0]}})
    with pytest.raises(ValueError, match="the plan does not fit Sequential at '0'"):
        apply_plan(model, {"0": {"out": [9]}})


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_model_that_cannot_be_followed() -> None:
    with pytest.raises(ValueError, match=r"torch\.fx cannot follow the forward of Branches"):
        prune_channels(Branches(), noise(1, 3), amount=0.5)


@pytest.mark.parametrize(
    ("change", "amount", "images", "message"),
    [
        (None, {}, torch.zeros(1, 3, 8, 8), r"an amount is in \(0, 1\), got \{\}"),
        (None, 0.5, torch.zeros(0, 3, 8, 8), "fails on the example in float64.*at least one image"),
        ("0.weight", 0.5, torch.zeros(1, 3, 8, 8), "rank the channels of 0 are not finite"),
        ("2.bias", 0.5, torch.zeros(1, 3, 8, 8), "the model gives NaN on the example"),
    ],
)
def test_what_shows_nothing_is_refused(change: Any, amount: Any, images: Any, message: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    if change is not None:
        nn.init.constant_(model.get_parameter(change), torch.nan)
    with pytest.raises(ValueError, match=message):
        prune_channels(model, images, amount=amount)


def test_an_amount_may_be_a_tensor_and_outputs_infinite() -> None:
    class Masked(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = super().forward(input)
            return output.clamp(min=0) * 0 - torch.inf

    model = Masked(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    pruned = prune_channels(model, torch.randn(1, 3, 8, 8), amount=torch.tensor(0.5))  # type: ignore[arg-type]
    assert len(pruned.plan["0"]["out"]) == 2


def test_tensors_in_a_dict_of_the_example() -> None:
    class Net(nn.Sequential):
        def forward(self, input: dict[str, list[Tensor]]) -> Tensor:
            output: Tensor = super().forward(input["images"][0])
            return output

    model = Net(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    image = torch.randn(1, 3, 8, 8)
    pruned = prune_channels(model, {"images": [image]}, amount=0.5)
    assert pruned.plan == prune_channels(nn.Sequential(*model), image, amount=0.5).plan
    assert pruned.model({"images": [image]}).shape == (1, 2, 4, 4)
