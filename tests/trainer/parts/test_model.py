"""Models by name: those of timm and torchvision load elsewhere, and what is no classifier is refused."""

import socket
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import torchvision.models
from torch import nn

from flambeau.errors import InputError
from flambeau.recipes.models.small_convnet import SmallConvNet
from flambeau.trainer.parts.model import (
    build_model,
    check_output,
    input_channels,
    pretrained_normalization,
)

SHAPE = {"num_classes": 3, "channels": 3, "image_size": 64}


def logits(model: nn.Module) -> torch.Tensor:
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(x)


def test_the_small_network() -> None:
    model = build_model("small_convnet", num_classes=3, channels=1, image_size=28)
    assert isinstance(model, SmallConvNet)
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 3)


def test_timm_knows_its_model_again() -> None:
    model = build_model("test_resnet", **SHAPE)
    other = timm.create_model("test_resnet", num_classes=3)
    other.load_state_dict(model.state_dict())  # strict
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=0)


def test_timm_takes_one_channel() -> None:
    model = build_model("test_resnet", num_classes=3, channels=1, image_size=32)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)


def test_a_model_with_positions_is_made_for_the_image_size() -> None:
    model = build_model("test_vit", num_classes=3, channels=3, image_size=96)
    assert model(torch.zeros(2, 3, 96, 96)).shape == (2, 3)


def test_torchvision_knows_its_model_again() -> None:
    model = build_model("torchvision:squeezenet1_1", **SHAPE)
    other = torchvision.models.squeezenet1_1(num_classes=3)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=0)


def test_googlenet_gives_one_tensor_in_training() -> None:
    """By default torchvision adds two more classifiers, and warns about its initial weights."""
    model = build_model("torchvision:googlenet", **SHAPE)
    assert model.training
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 3)
    torchvision.models.googlenet(
        num_classes=3, aux_logits=False, init_weights=False
    ).load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet199", r"unknown model 'resnet199'; did you mean 'resnet\d+'\? \(timm names"),
        ("smal_convnet", "did you mean 'small_convnet'"),
        ("qqqqqqqqqqq", r"^unknown model 'qqqqqqqqqqq' \(timm names"),
        ("torchvision:resnet19", r"'torchvision:resnet19'; did you mean 'torchvision:resnet\d+'"),
        ("torchvision:", "unknown model 'torchvision:'"),
        (
            "torchvision:resnet18.IMAGENET1K_V2",
            r"has no weights 'IMAGENET1K_V2'; did you mean '.*_V1'",
        ),
        ("torchvision:fasterrcnn_resnet50_fpn", "unknown model .*a classifier of torchvision"),
        ("torchvision:raft_small", "unknown model .*a classifier of torchvision"),
        ("torchvision:quantized_resnet18", "unknown model .*a classifier of torchvision"),
        ("torchvision:r3d_18", "unknown model .*a classifier of torchvision"),
        ("net.py", r"say which function: net\.py:FUNCTION"),
    ],
)
def test_unknown_names(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_model(name, **SHAPE)


def test_torchvision_is_for_color_unless_other_channels_are_asked_for() -> None:
    assert input_channels("torchvision:resnet18", grey=True) == 3
    assert input_channels("resnet18", grey=True) == 1
    assert input_channels("resnet18", grey=False) == 3


# ---------------------------------------------------------------- published weights


def save_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Put weights where torch.hub would have put the download."""
    weights = torchvision.models.squeezenet1_1(num_classes=1000).state_dict()
    file = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.url.rpartition("/")[2]
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(weights, tmp_path / "hub" / "checkpoints" / file)
    return weights


@pytest.mark.parametrize("num_classes", [3, 1000])
def test_torchvision_starts_from_published_weights(
    num_classes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = save_published(tmp_path, monkeypatch)
    shape = {**SHAPE, "num_classes": num_classes}
    model = build_model("torchvision:squeezenet1_1", pretrained=True, **shape)
    same = {name for name, t in model.state_dict().items() if torch.equal(t, weights[name])}
    head = {"classifier.1.weight", "classifier.1.bias"}
    assert same == (set(weights) - head if num_classes == 3 else set(weights))


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_the_first_published_layer_is_adapted_as_by_timm(
    channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = save_published(tmp_path, monkeypatch)
    shape = {**SHAPE, "channels": channels}
    model = build_model("torchvision:squeezenet1_1", pretrained=True, **shape)
    state = model.state_dict()
    wanted = timm.models.adapt_input_conv(channels, weights["features.0.weight"])
    torch.testing.assert_close(state["features.0.weight"], wanted)
    torch.testing.assert_close(state["features.0.bias"], weights["features.0.bias"])
    others = set(weights) - {"features.0.weight", "classifier.1.weight", "classifier.1.bias"}
    assert all(torch.equal(state[name], weights[name]) for name in others)
    assert model(torch.zeros(1, channels, 64, 64)).shape == (1, SHAPE["num_classes"])


@pytest.mark.parametrize("name", ["resnet18", "vit_b_32", "swin_t", "convnext_tiny", "googlenet"])
def test_models_of_torchvision_take_other_channels(name: str) -> None:
    torch.manual_seed(0)
    shape = {"num_classes": 3, "image_size": 224}
    of_color, model = (
        build_model(f"torchvision:{name}", channels=channels, **shape).eval() for channels in (3, 5)
    )
    with torch.inference_mode():
        assert model(torch.randn(2, 5, 224, 224)).shape == (2, 3)
    first, other = (
        next(layer for layer in one.modules() if isinstance(layer, nn.Conv2d))
        for one in (of_color, model)
    )
    assert (other.in_channels, other.stride, other.padding) == (5, first.stride, first.padding)
    spread = float(first.weight.detach().std()) * (3 / 5) ** 0.5
    assert float(other.weight.detach().std()) == pytest.approx(spread, rel=0.05)


def test_the_published_weights_that_the_name_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of resnet50 torchvision has two, and the default is the second."""
    weights = torchvision.models.resnet50().state_dict()
    url = torchvision.models.ResNet50_Weights.IMAGENET1K_V1.url
    asked = []

    def load(from_url: str, **_: Any) -> dict[str, torch.Tensor]:
        asked.append(from_url)
        return weights

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", load)
    model = build_model("torchvision:resnet50.IMAGENET1K_V1", pretrained=True, **SHAPE)
    assert asked == [url]
    torch.testing.assert_close(model.state_dict()["conv1.weight"], weights["conv1.weight"])
    build_model("torchvision:resnet50", pretrained=True, **SHAPE)
    assert asked[1] != url


def test_timm_starts_from_published_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = timm.create_model("test_resnet").state_dict()
    asked = []

    def load(model_id: str, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        asked.append(model_id)
        return dict(weights)

    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", load)
    model = build_model("test_resnet", pretrained=True, **SHAPE)
    assert asked == ["timm/test_resnet.r160_in1k"]
    own = model.state_dict()
    assert {n for n, t in own.items() if not torch.equal(t, weights[n])} == {"fc.weight", "fc.bias"}


def test_no_connection_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", fail)
    monkeypatch.setattr("timm.models._builder.load_state_dict_from_hf", fail)
    for name in ("torchvision:squeezenet1_1", "test_resnet"):
        with pytest.raises(
            InputError, match=r"published weights of .* are not available: .*no route"
        ):
            build_model(name, pretrained=True, **SHAPE)


@pytest.mark.timeout(30)  # the Hub's client tries again for 50 seconds
def test_a_machine_without_a_network_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_address(*args: Any, **kwargs: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    message = (
        "published weights of 'test_resnet' are not available: they are not in the cache, and "
        "huggingface.co cannot be reached; check the connection, or leave --pretrained out"
    )
    with pytest.raises(InputError, match=message):
        build_model("test_resnet", pretrained=True, **SHAPE)
    assert huggingface_hub.constants.HF_HUB_OFFLINE is False


def test_a_model_without_published_weights() -> None:
    name = next(n for n in timm.list_models("mobilenetv2*") if not timm.is_model_pretrained(n))
    with pytest.raises(InputError, match=f"weights of '{name}' are not available: .*leave --pretr"):
        build_model(name, pretrained=True, **SHAPE)


def test_images_are_normalised_as_for_the_published_weights() -> None:
    imagenet = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    assert pretrained_normalization("torchvision:resnet18", channels=3) == imagenet
    assert pretrained_normalization("resnet18", channels=3) == imagenet
    mean, std = pretrained_normalization("resnet18", channels=1) or ([], [])
    assert (mean, std) == ([pytest.approx(0.449)], [pytest.approx(0.226)])
    mean, std = pretrained_normalization("torchvision:resnet18", channels=1) or ([], [])
    assert (mean, std) == ([pytest.approx(0.449)], [pytest.approx(0.226)])
    assert pretrained_normalization("nope", channels=3) is None
    # Of other channels nothing is published: their own statistics are used.
    assert pretrained_normalization("resnet18", channels=4) is None
    assert pretrained_normalization("torchvision:resnet18", channels=4) is None


# ---------------------------------------------------------------- a function in a file

FILE = """
from __future__ import annotations
import dataclasses
import torch
from torch import nn

@dataclasses.dataclass
class Widths:
    hidden: int = 5

def plain(num_classes, channels=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, num_classes))

def everything(**offered):
    assert set(offered) == {"num_classes", "channels", "image_size"}, offered
    return plain(offered["num_classes"])

class Network(nn.Module):
    def __init__(self, num_classes, image_size):
        super().__init__()
        self.head = nn.Linear(3 * image_size**2, num_classes)
    def forward(self, x):
        return self.head(x.flatten(1))

def number(num_classes):
    return 3

def deeper(depth, num_classes):
    return plain(num_classes)

def by_position(num_classes, /):
    return plain(num_classes)

def broken(num_classes):
    return undefined_name

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def build(file: Path, name: str) -> nn.Module:
    return build_model(f"{file}:{name}", num_classes=4, channels=3, image_size=8)


@pytest.mark.parametrize("name", ["plain", "everything", "Network"])
def test_a_function_is_given_what_it_asks_for(name: str, file: Path) -> None:
    assert build(file, name)(torch.zeros(2, 3, 8, 8)).shape == (2, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", r"net\.py has no function 'nothing'"),
        ("", r"net\.py has no function ''"),
        ("constant", r"net\.py has no function 'constant'"),
        ("number", r"net\.py:number must return a torch\.nn\.Module, it returned int"),
        ("deeper", r"asks for 'depth'; it is called with any of num_classes, channels, image_size"),
        ("by_position", "asks for 'num_classes'; it is called with any of .* by name"),
        ("broken", r"net\.py, line \d+: NameError: name 'undefined_name' is not defined$"),
    ],
)
def test_a_function_that_does_not_do(name: str, message: str, file: Path) -> None:
    with pytest.raises(InputError, match=message):
        build(file, name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def make(:", r"net\.py: SyntaxError: invalid syntax \(net\.py, line 1\)$"),
        (
            "\nimport not_there",
            r"net\.py, line 2: ModuleNotFoundError: No module named 'not_there'$",
        ),
        ("raise ValueError", r"net\.py, line 1: ValueError: ValueError$"),
    ],
)
def test_a_file_that_cannot_be_imported(source: str, message: str, file: Path) -> None:
    file.write_text(source, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        build(file, "make")


def test_a_file_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.py", tmp_path / "folder.py"):
        (tmp_path / "folder.py").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=f"^--model: {path} is not a file$"):
            build(path, "make")


# ---------------------------------------------------------------- what a forward pass gives


class Answers(nn.Module):
    def __init__(self, answer: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.head, self.answer = nn.Linear(12, 2), answer
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.answer(self, self.head(x.flatten(1)))


def check(model: nn.Module, **more: Any) -> None:
    check_output(model, num_classes=2, channels=3, image_size=2, **more)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _, y: y[:, :1], r"must give logits of shape \(N, 2\); on 1 x 3 x 2 x 2 it gives \(1, 1\)"),
        (lambda _, y: y[0], r"must give logits of shape \(N, 2\); .* it gives \(2,\)"),
        (lambda _, y: (y, y), "it gives tuple"),
        (lambda _, y: {}["y"], r"the model fails on 1 x 3 x 2 x 2: KeyError: 'y'$"),
        (lambda _, y: y @ y, "the model fails on 1 x 3 x 2 x 2: RuntimeError: .*mat1 and mat2"),
    ],
)  # fmt: skip
def test_wrong_output_is_seen_at_once(answer: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(Answers(answer))


def test_training_may_give_something_else() -> None:
    model = Answers(lambda self, y: (y, y) if self.training else y)
    check(model)
    with pytest.raises(InputError, match="in training on 2 x 3 x 2 x 2 it gives tuple"):
        check(model, training=True, num_images=2)


def test_the_check_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), Answers(lambda _, y: y), nn.Dropout())
    model[0].eval()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    check(model)
    check(model, training=True, num_images=2)
    assert [m.training for m in model] == [False, True, True]
    for name, t in model.state_dict().items():
        torch.testing.assert_close(t, before[name], rtol=0, atol=0)
    assert not any(p.grad is not None or p.is_inference() for p in model.parameters())


def test_a_lazy_model_can_be_trained_after_the_check() -> None:
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(2))
    check(model)
    assert not model[1].weight.is_inference()
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    model(torch.ones(1, 12)).sum().backward()
    optimizer.step()


def test_nothing_to_train() -> None:
    for model in (nn.Flatten(), nn.Linear(12, 2).requires_grad_(False)):
        with pytest.raises(InputError, match="no parameter that can be trained"):
            check(model)
