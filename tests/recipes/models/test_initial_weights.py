"""Variances against torch.nn.init where it is right, and against numbers for groups and strides."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

from flambeau.recipes.models.initial_weights import initialize_weights, set_weight


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def std_of(layer: Any, **settings: Any) -> float:
    assert initialize_weights(layer, generator=seeded(), **settings) == ()
    assert layer.bias is None or not layer.bias.any()
    assert abs(layer.weight.mean()) < 4 * layer.weight.std() / math.sqrt(layer.weight.numel())
    return float(layer.weight.detach().std())


@pytest.mark.parametrize("mode", ["fan_in", "fan_out"])
@pytest.mark.parametrize("slope", [0.0, 0.2])
@pytest.mark.parametrize(
    "layer", [nn.Linear(300, 200), nn.Conv1d(64, 100, 9), nn.Conv2d(64, 96, 3), nn.Conv3d(9, 40, 3)]
)
def test_kaiming_draws_what_torch_draws(layer: Any, slope: float, mode: Any) -> None:
    got = std_of(layer, mode=mode, negative_slope=slope)
    expected = nn.init.kaiming_normal_(
        torch.empty_like(layer.weight), slope, mode, "leaky_relu", generator=seeded()
    )
    assert_close(layer.weight.detach(), expected)
    assert got == pytest.approx(float(expected.std()))


@pytest.mark.parametrize("layer", [nn.Linear(300, 200), nn.Conv2d(64, 96, 3)])
def test_xavier_draws_what_torch_draws(layer: Any) -> None:
    initialize_weights(nn.Sequential(nn.ReLU(), layer), xavier=["1"], generator=seeded())
    expected = nn.init.xavier_normal_(torch.empty_like(layer.weight), generator=seeded())
    assert_close(layer.weight.detach(), expected)


@pytest.mark.parametrize(
    ("layer", "fan_in", "fan_out"),
    [
        (nn.Conv2d(64, 128, 3, groups=4), 16 * 9, 32 * 9),
        (nn.Conv2d(2048, 2048, 3, groups=2048), 9, 9),  # depthwise
        (nn.Conv2d(64, 128, 3, stride=2), 64 * 9, 128 * 9),
        (nn.ConvTranspose2d(64, 128, 3), 64 * 9, 128 * 9),
        (nn.ConvTranspose2d(64, 128, 4, stride=2), 64 * 4, 128 * 16),
        (nn.ConvTranspose1d(64, 128, 6, stride=3, groups=2), 32 * 2, 64 * 6),
        (nn.ConvTranspose3d(32, 48, 2, stride=2), 32, 48 * 8),
    ],
)
def test_fans_of_groups_and_transposed_convolutions(layer: Any, fan_in: int, fan_out: int) -> None:
    assert std_of(layer) == pytest.approx(math.sqrt(2 / fan_in), rel=0.03)
    assert std_of(layer, mode="fan_out") == pytest.approx(math.sqrt(2 / fan_out), rel=0.03)
    assert std_of(layer, xavier=["*"]) == pytest.approx(math.sqrt(2 / (fan_in + fan_out)), rel=0.03)


def test_a_deep_model_keeps_the_size_of_its_activations() -> None:
    """What the formulas are for: the mean square of the values before each ReLU stays."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, stride=2, padding=1, groups=2), nn.ReLU()]
        layers += [nn.ConvTranspose2d(64, 64, 4, stride=2, padding=1, groups=4), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(64, 64, 1))
    initialize_weights(model, generator=seeded())
    x = torch.randn(8, 64, 32, 32, generator=seeded(1)) * math.sqrt(2)
    with torch.no_grad():
        size = model(x.relu()).square().mean()
    assert 0.5 < size < 3  # with torch's fans: 0.006


class Block(nn.Module):
    """A residual block in which the last norm is `norm2`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        return x + self.norm2(self.conv2(y))  # type: ignore[no-any-return]


def test_a_block_whose_last_norm_is_zero_is_the_identity() -> None:
    model, x = nn.Sequential(Block(), Block()), torch.randn(2, 4, 5, 5)
    assert not torch.equal(model(x), x)
    initialize_weights(model, zero_norms=["*.norm2"])
    assert torch.equal(model(x), x)
    assert model[1].norm1.weight.eq(1).all()


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.InstanceNorm2d(4), nn.SyncBatchNorm(4),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.GroupNorm(2, 4),
        nn.GroupNorm(2, 4, affine=False), nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False),
        nn.LayerNorm(4, bias=False), nn.RMSNorm(4), nn.RMSNorm(4, elementwise_affine=False),
        nn.BatchNorm1d(4, track_running_stats=False),
    ],
)  # fmt: skip
def test_norms_begin_as_new(norm: nn.Module) -> None:
    new = {key: value.clone() for key, value in norm.state_dict().items()}
    with torch.no_grad():
        for value in norm.state_dict().values():
            value.fill_(7)
    assert initialize_weights(norm) == ()
    assert_close(norm.state_dict(), new, rtol=0, atol=0)


def test_names_of_what_it_left_and_parameters_that_are_shared() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.full((3,), 5.0))
            self.embed = nn.Embedding(10, 4)
            self.out = nn.Linear(4, 10)
            self.out.weight = self.embed.weight
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.again = self.first
            self.frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)

    model, alone = Model(), nn.Linear(4, 4)
    model.frozen[1].running_mean.fill_(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    left = initialize_weights(model, generator=seeded())
    frozen = tuple(name for name, _ in model.named_parameters() if "frozen" in name)
    assert left == ("token", "embed.weight", *frozen)
    for name in (*left, "frozen.1.running_mean"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert not model.out.bias.any()
    initialize_weights(alone, generator=seeded())
    assert torch.equal(model.first.weight, alone.weight)  # drawn once, and first


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_draw_for_every_dtype_and_memory_format(dtype: torch.dtype) -> None:
    reference = nn.Conv2d(8, 16, 3)
    initialize_weights(reference, generator=seeded())
    layer = nn.Conv2d(8, 16, 3).to(dtype=dtype, memory_format=torch.channels_last)
    initialize_weights(layer, generator=seeded())
    assert layer.weight.dtype == dtype
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    if dtype == torch.float64:  # a draw of its own
        assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(2 / 72), rel=0.1)
    else:
        assert torch.equal(layer.weight, reference.weight.to(dtype))


def test_equal_seeds_give_equal_models_without_the_global_generator() -> None:
    state = torch.get_rng_state()
    one, two = nn.Sequential(nn.Linear(4, 4), Block()), nn.Sequential(nn.Linear(4, 4), Block())
    torch.set_rng_state(state)
    initialize_weights(one, generator=seeded())
    initialize_weights(two, generator=seeded())
    assert_close(one.state_dict(), two.state_dict(), rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    initialize_weights(two)
    assert torch.equal(one[0].weight, two[0].weight)  # the global one, seeded alike
    initialize_weights(two, generator=seeded(1))
    assert not torch.equal(one[0].weight, two[0].weight)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_generator_on_the_cpu_gives_a_gpu_the_same_weights() -> None:
    here, there = nn.Conv2d(8, 16, 3), nn.Conv2d(8, 16, 3).to("cuda")
    initialize_weights(here, generator=seeded())
    initialize_weights(there, generator=seeded())
    assert torch.equal(there.weight.cpu(), here.weight)


PRUNED = nn.Linear(2, 2)
prune.random_unstructured(PRUNED, "weight", 0.5)


@pytest.mark.parametrize(
    ("bad", "settings", "message"),
    [
        (nn.LazyLinear(2), {}, "'bad.weight' is lazy and has no shape yet: run one batch"),
        (nn.LazyBatchNorm1d(), {}, "'bad.weight' is lazy"),
        (nn.Linear(2, 2, device="meta"), {}, "'bad.weight' is on the meta device, .*to_empty"),
        (parametrizations.weight_norm(nn.Linear(2, 2)), {}, "the weight of 'bad' is computed from"),
        (parametrizations.spectral_norm(nn.Conv2d(2, 2, 1)), {}, "is computed from other param"),
        (PRUNED, {}, "is computed from other parameters"),
        (nn.ReLU(), {"mode": "fan_avg"}, "mode must be 'fan_in' or 'fan_out', got 'fan_avg'"),
        (nn.ReLU(), {"xavier": ["head*"]}, r"xavier: 'head\*' matches no layer; there are \['good'"),
        (nn.ReLU(), {"zero_norms": ["good"]}, r"zero_norms: 'good' matches no norm; there are \[\]"),
        (nn.BatchNorm1d(2, affine=False), {"zero_norms": ["b*"]}, "zero_norms: 'bad' has no weight"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_set_is_refused_before_anything_changes(
    bad: nn.Module, settings: Any, message: str
) -> None:
    model = nn.ModuleDict({"good": nn.Linear(2, 2), "bad": bad})
    before = model["good"].weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        initialize_weights(model, **settings)
    assert torch.equal(model["good"].weight, before)
    with pytest.raises(TypeError, match="xavier is a list of patterns, got the string 'good'"):
        initialize_weights(model, xavier="good")


def test_a_layer_is_found_by_any_of_its_names() -> None:
    drawn = []
    for name in ("fc", "head", None):
        model = nn.ModuleDict({"fc": nn.Linear(300, 5)})
        model["head"] = model["fc"]
        settings: Any = {"xavier": [name]} if name else {}
        initialize_weights(model, generator=torch.Generator().manual_seed(0), **settings)
        drawn.append(model["fc"].weight.detach())
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


def test_weights_of_ones_own_are_trained_by_an_optimizer_that_has_the_parameter() -> None:
    layer = nn.Linear(2, 2, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    held, values = layer.weight, torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    set_weight(layer.weight, values)
    assert layer.weight is held
    assert held.requires_grad
    assert held.is_leaf
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert_close(layer.weight.detach(), values - 0.5)
    assert_close(values[0], torch.tensor([1.0, 2.0]))  # a copy


@pytest.mark.parametrize(
    ("parameter", "values", "kind", "message"),
    [
        (nn.Linear(2, 3).weight, torch.ones(2), ValueError, r"\[2\] for a parameter of \[3, 2\]"),
        (nn.Linear(2, 3).weight, torch.ones(3, 2).double(), TypeError, r"values.to\(torch.float32\)"),
        (torch.ones(2), torch.ones(2), TypeError, "a parameter is needed, got Tensor"),
        (nn.Linear(1, 1, device="meta").weight, torch.ones(1, 1), ValueError, "parameter is on the meta"),
        (nn.Linear(1, 1).weight, torch.ones(1, 1, device="meta"), ValueError, "values is on the meta"),
        (nn.UninitializedParameter(), torch.ones(1), ValueError, "the parameter is lazy"),
        (parametrizations.weight_norm(nn.Linear(1, 1)).weight, torch.ones(1, 1), TypeError, "computed"),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_refused(
    parameter: Any, values: Tensor, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        set_weight(parameter, values)
