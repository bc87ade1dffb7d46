import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flambeau.recipes.memory.inplace_abn import InPlaceABN, use_inplace_abn


def pair(slope: float = 0.01, momentum: float | None = 0.1) -> tuple[nn.Sequential, InPlaceABN]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm2d(6, momentum=momentum), nn.LeakyReLU(slope)).double()
    nn.init.normal_(plain[0].weight)  # negative ones among them
    nn.init.normal_(plain[0].bias)
    ours = InPlaceABN(6, negative_slope=slope, momentum=momentum).double()
    ours.load_state_dict(plain[0].state_dict())
    return plain, ours


def images(*, channels_last: bool = False) -> Tensor:
    x = torch.randn(3, 6, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
    for p in layer.parameters():
        p.grad = None
    x = x.clone().requires_grad_()
    out = layer(x)
    weights = torch.arange(out.numel(), device=out.device).cos().view(out.shape).to(out.dtype)
    (out * weights).sum().backward()
    assert x.grad is not None
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *grads, *layer.buffers()]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("slope", "momentum"), [(0.01, 0.1), (0.3, None), (1.0, 0.1)])
def test_equals_batchnorm_and_leaky_relu(
    training: bool, channels_last: bool, slope: float, momentum: float | None
) -> None:
    plain, ours = pair(slope, momentum)
    x = images(channels_last=channels_last)
    for _ in range(2):
        expected, got = run(plain.train(training), x), run(ours.train(training), x)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)
    assert got[0].stride() == expected[0].stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_is_as_good_as_the_format(dtype: torch.dtype) -> None:
    plain, ours = pair()
    with torch.no_grad():  # what is rounded in y counts 1/scale times in the recovered input
        plain[0].weight.copy_(plain[0].weight.sign() * plain[0].weight.abs().clamp(min=0.25))
    ours.load_state_dict(plain[0].state_dict())
    expected = run(plain, images())
    ours.float()
    got = run(ours, images().to(dtype))
    assert got[0].dtype == got[1].dtype == dtype
    assert got[2].dtype == torch.float32
    bound = 200 * torch.finfo(dtype).eps
    for a, b in zip(got[:4], expected[:4], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=float(bound * b.abs().max()))


@pytest.mark.parametrize("training", [True, False])
def test_gradcheck(training: bool) -> None:
    _, ours = pair()
    ours.train(training)
    x = torch.randn(2, 6, 2, 2, dtype=torch.float64, requires_grad=True)

    def of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(ours, {"weight": weight, "bias": bias}, (x,))
        return out

    assert torch.autograd.gradcheck(of, (x, ours.weight, ours.bias))


def test_scales_near_zero_stay_finite_and_can_cross() -> None:
    _, ours = pair()
    with torch.no_grad():
        ours.weight.copy_(torch.tensor([0.0, 1e-9, -1e-9, 5e-5, -2e-4, 1.0]))
    ours.float()
    out, grad_x, grad_weight, *_ = run(ours, images().float())
    assert all(t.isfinite().all() for t in (out, grad_x, grad_weight))
    # The output is that of a scale of 1e-4 at most: within 1e-4 times a normalised input of about 4.
    exact = nn.functional.batch_norm(images().float(), None, None, ours.weight, ours.bias, True)
    exact = nn.functional.leaky_relu(exact, 0.01)
    torch.testing.assert_close(out, exact.detach(), rtol=0, atol=5e-4)
    # The gradient of the scale is right, also where the scale is 0: that of batch_norm itself.
    weight = ours.weight.detach().double().requires_grad_()
    plain = nn.functional.batch_norm(images(), None, None, weight, ours.bias.double(), True)
    plain = nn.functional.leaky_relu(plain, 0.01)
    weights = torch.arange(plain.numel()).cos().view(plain.shape)
    (expected,) = torch.autograd.grad((plain * weights).sum(), weight)
    torch.testing.assert_close(grad_weight.double(), expected, rtol=5e-3, atol=5e-3)


def kept(model: nn.Module, x: Tensor) -> int:
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    assert out.requires_grad
    return sum(size for address, size in storages.items() if address not in known)


def network(*, inplace: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.LeakyReLU(0.01, inplace)]
    return nn.Sequential(*layers, nn.Conv2d(6, 6, 1))


def test_memory() -> None:
    x = torch.randn(4, 6, 16, 16)
    plain, inplace = kept(network(inplace=False), x), kept(network(inplace=True), x)
    model = network(inplace=False)
    assert len(use_inplace_abn(model, x)) == 4
    ours = kept(model, x)
    feature = x.nbytes
    few = 4 * 6 * 4 * 8  # statistics
    # Besides the image: input of BatchNorm, of LeakyReLU and of the convolution; two of them; one of them.
    assert plain == pytest.approx(13 * feature, abs=few)
    assert inplace == pytest.approx(9 * feature, abs=few)
    assert ours == pytest.approx(5 * feature, abs=few)


class Shared(nn.Module):
    """One activation for all, as torchvision's ResNet has; dropout; a residual after it."""

    def __init__(self, *, leak: bool = False) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None)
        self.act, self.drop, self.leak = nn.LeakyReLU(0.1, inplace=not leak), nn.Dropout(), leak

    def forward(self, x: Tensor) -> Tensor:
        z = self.bn1(self.conv1(x))
        y = self.act(z)
        out: Tensor = self.drop(y) + self.act(self.bn2(self.conv2(z if self.leak else y)))
        return out


def test_conversion_keeps_objects_names_and_results() -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    weight, mean = model.bn1.weight, model.bn1.running_mean
    rng = torch.get_rng_state()
    assert use_inplace_abn(model, x) == ["bn1", "bn2"]
    assert torch.equal(rng, torch.get_rng_state())
    assert isinstance(model.bn1, InPlaceABN)
    assert not model.bn1.training
    assert model.bn1.weight is weight
    assert model.bn1.running_mean is mean
    assert isinstance(model.act, nn.Identity)
    assert model.bn2.momentum is None
    model.load_state_dict(plain.state_dict(), strict=True)
    torch.testing.assert_close(model(x), plain(x))


@pytest.mark.parametrize("case", ["read elsewhere", "scale of 0"])
def test_conversion_is_refused_where_something_changes(case: str) -> None:
    model = Shared(leak=case == "read elsewhere")
    if case == "scale of 0":
        nn.init.zeros_(model.bn1.weight)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="nothing was changed"):
        use_inplace_abn(model, torch.randn(2, 3, 8, 8))
    assert type(model.bn1) is nn.BatchNorm2d
    assert isinstance(model.act, nn.LeakyReLU)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert model.training


def test_conversion_leaves_what_is_no_pair() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.LeakyReLU(0.1),
        nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, affine=False), nn.LeakyReLU(0.1),
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"relu_slope=0\.01 puts leaky ones in the place"):
        assert use_inplace_abn(model, torch.randn(2, 3, 8, 8)) == []
    assert type(model[1]) is nn.BatchNorm2d


def test_conversion_leaves_a_norm_that_is_read_otherwise_in_another_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.act = nn.BatchNorm2d(3), nn.LeakyReLU(0.1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.act(self.norm(x)) + self.norm(x)
            return out

    assert use_inplace_abn(Twice(), torch.randn(2, 3, 4, 4)) == []


def test_second_derivative_and_slope_are_refused() -> None:
    _, ours = pair()
    x = images().requires_grad_()
    (grad,) = torch.autograd.grad(ours(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    for slope in (0.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=r"negative_slope must be in \(0, 1\]"):
            InPlaceABN(4, negative_slope=slope)


def test_an_output_changed_in_place_is_noticed() -> None:
    _, ours = pair()
    out = ours(images().requires_grad_())
    out.add_(1)
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


def test_meta_device() -> None:
    assert InPlaceABN(3).to("meta")(torch.empty(2, 3, 4, 4, device="meta")).is_meta
    assert "negative_slope=0.01" in repr(InPlaceABN(3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda() -> None:
    plain, ours = pair()
    x = images().to("cuda")
    expected, got = run(plain.to("cuda"), x), run(ours.to("cuda"), x)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


def test_a_pair_with_hooks_is_left() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.LeakyReLU(), nn.BatchNorm2d(2), nn.LeakyReLU())
    seen = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(1))
    assert use_inplace_abn(model, torch.randn(2, 2, 3, 3)) == ["2"]
    seen.clear()
    model(torch.randn(2, 2, 3, 3))
    assert seen == [1]


def test_relu_becomes_leaky_as_in_the_paper_where_a_slope_is_given() -> None:
    def network(make: Callable[[], nn.Module]) -> nn.Sequential:
        torch.manual_seed(0)
        block = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), make(), nn.Conv2d(4, 4, 3), make()]
        return nn.Sequential(*block)

    x = torch.randn(2, 3, 8, 8)
    model, state = network(nn.ReLU), network(nn.ReLU).state_dict()
    with pytest.warns(UserWarning, match="a ReLU cannot be inverted"):
        assert use_inplace_abn(model, x) == []
    assert use_inplace_abn(model, x, relu_slope=0.01) == ["1"]
    assert list(model.state_dict()) == list(state)
    assert isinstance(model[4], nn.ReLU)  # not behind a BatchNorm
    expected = network(lambda: nn.LeakyReLU(0.01))
    expected[4] = nn.ReLU()
    torch.testing.assert_close(model(x), expected(x))
    torch.testing.assert_close(model[1](x.new_ones(2, 4, 2, 2)).min(), model[1].bias.min() * 0.01)
    with pytest.raises(ValueError, match=r"relu_slope must be in \(0, 1\], got 0"):
        use_inplace_abn(model, x, relu_slope=0.0)


def test_a_resnet_of_timm_with_relu() -> None:
    import timm

    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=3, zero_init_last=False)
    found = use_inplace_abn(model, torch.randn(2, 3, 32, 32), relu_slope=0.01)
    assert found == ["bn1", *(f"layer{n}.{block}.bn1" for n in range(1, 5) for block in (0, 1))]


class _ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.BatchNorm2d(3), nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(input=self.norm(input=x))
        return out


def test_layers_that_are_called_by_the_name_of_their_argument() -> None:
    model, x = _ByName(), torch.randn(2, 3, 4, 4)
    expected = copy.deepcopy(model)(x)
    assert use_inplace_abn(model, x) == ["norm"]
    torch.testing.assert_close(model(x), expected)
