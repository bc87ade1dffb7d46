import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flambeau.recipes.models.feature_extractor import captured, feature_extractor

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=10)  # in train mode, as it is made


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def equal(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_equals_torchvisions_extractor(resnet: nn.Module, images: Tensor) -> None:
    from torchvision.models.feature_extraction import create_feature_extractor

    layers = ["avgpool", "layer1", "layer3.1", "layer4.0.downsample", "fc"]
    model = copy.deepcopy(resnet).eval()
    theirs = create_feature_extractor(model, layers)
    features = feature_extractor(resnet, layers)(images)
    assert list(features) == layers  # in the order asked for, not of the forward
    for name, value in theirs(images).items():
        equal(features[name], value.detach())


def test_pooled_features_of_resnet(resnet: nn.Module, images: Tensor) -> None:
    """The usual `children()[:-1]` gives the same."""
    pooled = feature_extractor(resnet, ["avgpool"])(images)["avgpool"]
    assert pooled.shape == (2, 512, 1, 1)
    trunk = nn.Sequential(*list(copy.deepcopy(resnet).eval().children())[:-1])
    equal(pooled, trunk(images).detach())


def test_what_comes_next_does_not_write_into_a_feature(resnet: nn.Module, images: Tensor) -> None:
    """`relu` writes into the output of bn1, and `out += identity` into that of bn2."""
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            features = feature_extractor(resnet, ["bn1", "relu", "layer1.0.bn2"])(images)
            normed = F.batch_norm(
                F.conv2d(images, resnet.conv1.weight, stride=2, padding=3),
                resnet.bn1.running_mean,
                resnet.bn1.running_var,
                resnet.bn1.weight,
                resnet.bn1.bias,
            )
            torch.testing.assert_close(features["bn1"], normed)
            equal(features["relu"], features["bn1"].clamp(min=0))
            assert (features["layer1.0.bn2"] < 0).any()


def test_train_mode_and_statistics_stay(resnet: nn.Module, images: Tensor) -> None:
    resnet.layer2.eval()  # a mixture of modes
    before = {name: value.clone() for name, value in resnet.state_dict().items()}
    modes = [module.training for module in resnet.modules()]
    feature_extractor(resnet, ["layer4"])(images)
    assert [module.training for module in resnet.modules()] == modes
    for name, value in resnet.state_dict().items():
        equal(value, before[name])
    assert hooks_of(resnet) == 0
    resnet.train()


def test_vgg_names_of_the_notes() -> None:
    """On VGG16 without its 138 million weights."""
    import torchvision

    with torch.device("meta"):
        model = torchvision.models.vgg16()
        images = torch.empty(2, 3, 224, 224)
    layers = {
        "features.29": (512, 14, 14),  # relu5_3
        "features.30": (512, 7, 7),  # pool5, often taken for relu5_3
        "classifier.3": (4096,),  # fc7 before its ReLU, what `classifier[:-3]` gives
        "classifier.4": (4096,),  # fc7
    }
    features = feature_extractor(model, list(layers))(images)
    assert {name: tuple(value.shape[1:]) for name, value in features.items()} == layers
    assert isinstance(model.features[29], nn.ReLU)
    assert isinstance(model.features[30], nn.MaxPool2d)
    assert features["features.29"].is_meta


class Halting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        try:
            x = self.second(self.first(x) * scale)
        except Exception:
            pytest.fail("the model saw the early end")
        raise ArithmeticError("the rest of the forward ran")


def test_stop_early_skips_the_rest() -> None:
    model = Halting()
    x = torch.ones(1, 2)
    features = feature_extractor(model, ["second", "first"], stop_early=True)(x, scale=2.0)
    equal(features["second"], model.second(model.first(x) * 2).detach())
    assert list(features) == ["second", "first"]
    with pytest.raises(ArithmeticError):
        feature_extractor(model, ["second"])(x)


def test_an_exception_leaves_no_hook_and_no_other_mode() -> None:
    model = Halting()
    with pytest.raises(ArithmeticError):
        feature_extractor(model, ["first"])(torch.ones(1, 2))
    assert hooks_of(model) == 0
    assert model.first.training
    with pytest.raises(KeyError), captured(model, ["first"]):
        raise KeyError
    assert hooks_of(model) == 0


def test_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert not feature_extractor(model, ["0"])(x)["0"].requires_grad
    extract = feature_extractor(model, ["0", "2"], grad=True)
    assert torch.autograd.gradcheck(lambda x: tuple(extract(x).values()), [x])
    extract(x)["0"].square().sum().backward()
    by_hand = torch.autograd.grad(model[0](x).square().sum(), [x, model[0].weight])
    torch.testing.assert_close([x.grad, model[0].weight.grad], list(by_hand))


def test_captured_leaves_the_training_forward_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    alone = copy.deepcopy(model)
    x = torch.randn(8, 3)
    with captured(model, ["1"]) as features:
        output = model(x)
        assert features == {}  # filled at the end
    expected = alone(x)
    equal(output, expected)
    assert model[1].num_batches_tracked == 1
    (output.sum() + features["1"].square().sum()).backward()
    (expected.sum() + alone[1](alone[0](x)).square().sum()).backward()
    torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.same = self.act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.act(x) - 1)


def test_a_layer_that_runs_several_times_needs_a_number() -> None:
    x = torch.tensor([3.0, -1.0])
    features = feature_extractor(Shared(), ["act#1", "act#0", "same#1"])(x)
    equal(features["act#0"], torch.tensor([3.0, 0.0]))
    equal(features["act#1"], torch.tensor([2.0, 0.0]))
    equal(features["same#1"], features["act#1"])
    for name in ("act", "same"):
        with pytest.raises(RuntimeError, match=f"'{name}' ran 2 times: ask for '{name}#0', ... or"):
            feature_extractor(Shared(), [name])(x)
    first = feature_extractor(Shared(), ["act"], stop_early=True)(x)
    equal(first["act"], features["act#0"])
    with pytest.raises(RuntimeError, match="'act#2' did not run, or not that often"):
        feature_extractor(Shared(), ["act#2"])(x)


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


class Nest(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"pair": Pair(x, [x + 1]), "none": None, "both": (x, 2)}


def test_outputs_that_are_not_one_tensor() -> None:
    x = torch.zeros(2)
    model = nn.Sequential(Nest())
    features = feature_extractor(model, ["0"])(x)["0"]
    x += 7  # what the dict held is written into
    assert isinstance(features["pair"], Pair)
    equal(features["pair"].left, torch.zeros(2))
    equal(features["pair"].right[0], torch.ones(2))
    equal(features["both"][0], torch.zeros(2))
    assert features["both"][1] == 2
    assert features["none"] is None


def test_attention_and_lstm() -> None:
    """A transformer layer has a fast path that runs none of its modules; hooks switch it off."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    x = torch.randn(1, 3, 4)
    attended, weights = feature_extractor(layer, ["self_attn"])(x)["self_attn"]
    torch.testing.assert_close(attended, layer.self_attn(x, x, x)[0].detach())
    assert weights is None
    with pytest.raises(RuntimeError, match=r"'self_attn\.out_proj' did not run"):
        feature_extractor(layer, ["self_attn.out_proj"])(x)
    lstm = nn.LSTM(4, 2)
    _, (h, _c) = feature_extractor(nn.Sequential(lstm), ["0"])(x)["0"]
    equal(h, lstm(x)[1][0].detach())


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {x}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_follows_the_model(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(2, 2)).to(dtype)
    feature = feature_extractor(model, ["0"])(torch.ones(1, 2, dtype=dtype))["0"]
    assert feature.dtype == dtype


@pytest.mark.gpu
@needs_cuda
def test_device_follows_the_model() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)).to("cuda")
    x = torch.ones(1, 2, device="cuda")
    feature = feature_extractor(model, ["0"])(x)["0"]
    equal(feature, model[0](x).detach())


def test_refused(resnet: nn.Module) -> None:
    with pytest.raises(TypeError, match=r"got one string: \['layer4'\]"):
        feature_extractor(resnet, "layer4")
    inside_layer1 = (
        r"did you mean 'layer1\.1\.conv1' .*Inside of 'layer1\.1' are: conv1, bn1, relu,"
    )
    with pytest.raises(ValueError, match="no layer 'layer1.1.konv1', " + inside_layer1):
        feature_extractor(resnet, ["fc", "layer1.1.konv1"])
    with pytest.raises(
        ValueError, match=r"no layer 'zzz'\. Inside of the model are: conv1, bn1, relu"
    ):
        feature_extractor(resnet, ["zzz"])
    with pytest.raises(ValueError, match="no layer 'fc#x'"):
        feature_extractor(resnet, ["fc#x"])
    with (
        pytest.raises(ValueError, match="did you mean 'fc'"),
        captured(resnet, ["fcc"]),
    ):
        pytest.fail("the block ran")
    with pytest.raises(TypeError, match="layer '0' returned a set: only tensors"):
        feature_extractor(nn.Sequential(Odd()), ["0"])(torch.ones(1))
