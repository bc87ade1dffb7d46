"""Folded layers and networks against those that they were made of, with statistics as after training."""

import copy
import re
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.testing import assert_close

from flambeau.recipes.compress.fold_batchnorm import fold_batchnorm, fold_pair

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def trained(model: nn.Module) -> nn.Module:
    """Nothing is 0 or 1 any more, and some weights of BatchNorm are negative."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, tuple(NORMS.values())) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
            if module.affine:
                with torch.no_grad():
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                    module.weight[::5] *= -1
                    module.bias.normal_(0, 0.3, generator=generator)
    return model.eval()


def noise(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("bias", "affine"), [(True, True), (False, True), (True, False)])
def test_a_pair_in_float64_and_float32(
    dims: int, transposed: bool, groups: int, bias: bool, affine: bool
) -> None:
    kind: Any = (TRANSPOSED if transposed else CONVS)[dims]
    settings = {"stride": 2, "padding": 1, "groups": groups, "bias": bias}
    torch.manual_seed(0)
    model = nn.Sequential(kind(8, 12, 3, **settings), NORMS[dims](12, affine=affine))
    trained(model).double()
    x = noise(2, 8, *[6] * dims).double()
    result, folded, left = fold_batchnorm(model, x)
    assert (folded, left) == ({"1": "0"}, {})
    assert_close(result(x), model(x), rtol=0, atol=1e-10)
    assert_close(result.float()(x.float()), model.float()(x.float()), rtol=1e-5, atol=1e-5)


def test_linear() -> None:
    model = trained(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.ReLU())).double()
    before = copy.deepcopy(model.state_dict())
    x = noise(3, 5).double()
    result, folded, _ = fold_batchnorm(model, x)
    assert folded == {"1": "0"}
    assert isinstance(result.get_submodule("1"), nn.Identity)
    assert_close(result(x), model(x), rtol=0, atol=1e-10)
    assert_close(model.state_dict(), before, rtol=0, atol=0)  # a new model; the old one as it was
    assert result.get_parameter("0.weight").dtype == torch.float64


def test_dtype_and_requires_grad_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    trained(model).bfloat16().requires_grad_(False)
    result = fold_batchnorm(model, noise(1, 3, 8, 8).bfloat16()).model
    weight, bias = result.get_parameter("0.weight"), result.get_parameter("0.bias")
    assert weight.dtype == bias.dtype == torch.bfloat16
    assert not weight.requires_grad
    assert not bias.requires_grad


def check_network(model: nn.Module, num_left: int, size: int = 32) -> None:
    trained(model).double()
    x = noise(2, 3, size, size).double()
    result, folded, left = fold_batchnorm(model, x)
    assert len(left) == num_left, left
    assert len(folded) >= 8
    assert type(result) is type(model)
    num_norms = sum(isinstance(m, tuple(NORMS.values())) for m in result.modules())
    assert num_norms == num_left
    with torch.no_grad():
        expected = model(x)
        assert float(expected.std()) > 1e-4
        assert_close(result(x), expected, rtol=1e-9, atol=1e-10 * float(expected.abs().max()))
        model.float(), result.float()
        scale = float(expected.abs().max())
        assert_close(result(x.float()), model(x.float()), rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize(
    ("name", "num_left"), [("resnet18", 0), ("mobilenet_v3_small", 0), ("shufflenet_v2_x0_5", 0)]
)
def test_networks_of_torchvision(name: str, num_left: int) -> None:
    check_network(torchvision.models.get_model(name, num_classes=10), num_left)


# tf_mobilenetv3: convolutions of a class of its own, whose padding torch.fx cannot follow, and
# BatchNormAct2d. repvgg: BatchNorm on the identity. resnetv2: BatchNorm before the convolution.
@pytest.mark.parametrize(
    ("name", "num_left"), [("tf_mobilenetv3_small_minimal_100", 0), ("repvgg_a0", 17)]
)
def test_networks_of_timm(name: str, num_left: int) -> None:
    check_network(timm.create_model(name, num_classes=10), num_left)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_left"),
    [
        ("resnet50", 0), ("resnext50_32x4d", 0), ("mobilenet_v2", 0), ("densenet121", 62), ("vgg11_bn", 0),
        ("regnet_y_400mf", 0), ("efficientnet_b0", 0), ("googlenet", 2), ("mnasnet0_5", 0),
    ],
)  # fmt: skip
def test_more_networks_of_torchvision(name: str, num_left: int) -> None:
    settings = {"init_weights": False} if name == "googlenet" else {}
    check_network(torchvision.models.get_model(name, num_classes=10, **settings), num_left, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_left"),
    [
        ("cspresnet50", 0), ("hrnet_w18_small", 0), ("mobileone_s0", 35), ("resnetv2_50", 17), ("dla34", 0),
        ("res2net50_26w_4s", 0), ("skresnet18", 0), ("fastvit_t8", 24), ("ghostnet_100", 0),
    ],
)  # fmt: skip
def test_more_networks_of_timm(name: str, num_left: int) -> None:
    check_network(timm.create_model(name, num_classes=10), num_left, 64)


# ---------------------------------------------------------------- what is left


class Net(nn.Module):
    """conv and norm, with a forward of the test's."""

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.norm2 = nn.BatchNorm2d(3)
        self.way = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


LEFT = [  # forward, and of each BatchNorm the reason
    (
        lambda m, x: m.norm2(m.conv(m.norm(m.conv(x)))),
        {"norm": "'conv' is called 2 times", "norm2": "'conv' is called 2 times"},
    ),
    (
        lambda m, x: m.norm(m.conv(x)) + m.norm2(m.conv(x)),
        {"norm": "'conv' is called 2 times", "norm2": "'conv' is called 2 times"},
    ),
    (
        lambda m, x: (lambda y: m.norm(y) + m.norm2(y))(m.conv(x)),
        {"norm": "'conv' is also read by norm2", "norm2": "'conv' is also read by norm"},
    ),
    (
        lambda m, x: (lambda y: m.norm2(m.norm(y).relu()) + y)(m.conv(x)),
        {"norm": "'conv' is also read by add", "norm2": "not the output of a convolution .*relu"},
    ),
    (
        lambda m, x: m.norm(m.norm(m.conv(x))),
        {"norm": "not the output of a|'norm' is called 2 times", "norm2": "does not call it"},
    ),
    (
        lambda m, x: m.norm(m.conv(x)) * m.conv.weight.mean(),
        {"norm": "reads the weights of 'conv' itself", "norm2": "does not call it"},
    ),
]


@pytest.mark.parametrize(("forward", "reasons"), LEFT)
def test_what_would_be_wrong_is_left(forward: Any, reasons: dict[str, str]) -> None:
    model = trained(Net(forward))
    x = noise(2, 3, 6, 6)
    result, folded, left = fold_batchnorm(model, x)
    assert folded == {}
    assert left.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert re.search(reason, left[name]), left[name]
    assert_close(result(x), model(x), rtol=0, atol=0)


def test_training_mode_and_missing_statistics() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False),
        nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Dropout(),
    )  # fmt: skip
    trained(model)[3].train()
    model[6].train()
    _, folded, left = fold_batchnorm(model, noise(2, 3, 4, 4))
    assert folded == {"5": "4"}
    assert "no running statistics" in left["1"]
    assert "in training mode" in left["3"]


def test_hooks_and_parametrizations() -> None:
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))))
    model[0].register_forward_hook(lambda m, args, out: None)
    model[3].register_forward_pre_hook(lambda m, args: None)
    parametrizations.weight_norm(model[4])
    _, folded, left = fold_batchnorm(trained(model), noise(1, 3, 4, 4))
    assert folded == {"7": "6"}
    assert "'0' has hooks" in left["1"]
    assert "'3' has hooks" in left["3"]
    assert "'4' has a parametrization" in left["5"]


class Standardized(nn.Conv2d):
    """Its output does not change when its weight is scaled."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


def test_a_layer_whose_output_is_not_linear_in_its_weight() -> None:
    model = trained(nn.Sequential(Standardized(3, 4, 3), nn.BatchNorm2d(4)))
    _, folded, left = fold_batchnorm(model, noise(1, 3, 6, 6))
    assert folded == {}
    assert "'0' (Standardized) with folded weights gives something else" in left["1"]


def test_batchnorm_over_another_dimension_than_that_of_the_features() -> None:
    """Linear gives (N, L, F), BatchNorm1d normalizes L; where L = F nothing but the values says so."""
    model = trained(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4)))
    assert fold_batchnorm(model, noise(2, 5)).folded == {"1": "0"}
    assert fold_batchnorm(model, noise(2, 4, 5)).folded == {}


class Branches(nn.Module):
    """A path that depends on values, inside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)) if x.sum() > 0 else x


def test_a_path_that_depends_on_values() -> None:
    inside = trained(nn.Sequential(Branches(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    _, folded, left = fold_batchnorm(inside, noise(1, 3, 4, 4))
    assert folded == {"2": "1"}
    assert "torch.fx cannot follow" in left["0.norm"]
    with pytest.raises(ValueError, match=r"torch\.fx cannot follow the forward of Branches"):
        fold_batchnorm(trained(Branches()), noise(1, 3, 4, 4))


def test_arguments_with_defaults_take_the_path_of_the_example() -> None:
    def forward(self: Any, x: Tensor, extra: Tensor | None = None, twice: bool = False) -> Tensor:
        x = self.norm(self.conv(x))
        if extra is not None:
            x = self.norm2(x + extra)
        return 2 * x if twice else x

    class Optional(Net):
        pass

    Optional.forward = forward  # type: ignore[method-assign,assignment]
    model = trained(Optional(None)).double()
    x = noise(1, 3, 4, 4).double()
    for example in ((x,), (x, None, True), (x, x)):
        result, folded, left = fold_batchnorm(model, *example)
        assert folded == {"norm": "conv"}
        assert ("does not call it" in left["norm2"]) == (len(example) != 2)
        assert_close(result(*example), model(*example), rtol=0, atol=1e-10)


def test_refusals_of_a_pair() -> None:
    with pytest.raises(TypeError, match="got ReLU and BatchNorm2d"):
        fold_pair(nn.ReLU(), nn.BatchNorm2d(3))
    with pytest.raises(ValueError, match="no running statistics"):
        fold_pair(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, track_running_stats=False))
    with pytest.raises(ValueError, match="a layer of 4 channels before BatchNorm of 3"):
        fold_pair(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(3))


def test_outputs_that_are_not_finite() -> None:
    class Masked(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = super().forward(input)
            return output.masked_fill(torch.arange(4).view(1, 4, 1, 1) == 1, -torch.inf)

    x = torch.randn(2, 3, 5, 5)
    assert fold_batchnorm(Masked(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), x).folded == {
        "1": "0"
    }
    broken = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    nn.init.constant_(broken[0].weight, torch.nan)
    with pytest.raises(ValueError, match="the model gives NaN on the example"):
        fold_batchnorm(broken, x)


def test_tensors_in_a_dict_of_the_example() -> None:
    class Net(nn.Sequential):
        def forward(self, input: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            output: torch.Tensor = super().forward(input["images"][0])
            return output

    model = Net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    batch = {"images": [torch.randn(2, 3, 5, 5)]}
    folded = fold_batchnorm(model, batch)
    torch.testing.assert_close(folded.model(batch), model(batch))
