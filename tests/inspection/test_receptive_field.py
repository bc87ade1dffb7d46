"""Receptive fields: against the gradient of one output, and against the figures of the paper."""

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional

from flambeau.inspection.model_summary import summarize
from flambeau.inspection.receptive_field import RULES


def reached(model: nn.Module, side: int) -> tuple[int, ...]:
    """How many pixels have a gradient of one output in the middle, along both dimensions."""
    image = torch.ones(1, 1, side, side, dtype=torch.float64, requires_grad=True)
    output = model(image)
    output[0, 0, output.shape[2] // 2, output.shape[3] // 2].backward()
    assert image.grad is not None
    rows, columns = torch.nonzero(image.grad[0, 0], as_tuple=True)
    return int(rows.max() - rows.min() + 1), int(columns.max() - columns.min() + 1)


def with_ones(model: nn.Module) -> nn.Module:
    """All weights 1: no gradient is zero by chance."""
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model.double().eval()


class Swapped(nn.Module):
    """ConvNeXt's order: channels last, a norm over them, a Linear layer, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(1, 2, 5, padding=2), nn.Conv2d(3, 1, 3, stride=2)
        self.norm, self.linear = nn.LayerNorm(2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(self.before(x).permute(0, 2, 3, 1)) + 1)
        return self.after(functional.gelu(y).permute(0, 3, 1, 2))


class Branches(nn.Module):
    """Two ways, of 3 and of 9 pixels, added and concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 1, 3, padding=1)
        self.two = nn.Conv2d(1, 1, (5, 3), padding=(4, 2), dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x) + self.two(x), self.one(x)], 1)


NETWORKS = {
    "strides": [
        nn.Conv2d(1, 2, 3, stride=2, padding=1),
        nn.Conv2d(2, 2, (5, 1)),
        nn.AvgPool2d(3, 2),
        nn.Conv2d(2, 1, 3),
    ],
    "dilation": [nn.Conv2d(1, 1, 3, dilation=4), nn.AvgPool2d((2, 3)), nn.Conv2d(1, 1, 2)],
    "transposed": [
        nn.Conv2d(1, 1, 3, stride=4),
        nn.ConvTranspose2d(1, 1, 4, 2),
        nn.Conv2d(1, 1, 1),
    ],
    "nearest": [nn.Conv2d(1, 1, 3, stride=2), nn.Upsample(scale_factor=2), nn.Conv2d(1, 1, 1)],
    "branches": [Branches()],
    "norm": [nn.Conv2d(1, 2, 7), nn.BatchNorm2d(2), nn.LeakyReLU(), nn.Conv2d(2, 1, 3)],
}


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
     nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.LogSigmoid, nn.Softplus, nn.Tanh],
)  # fmt: skip
def test_an_activation_leaves_it_as_it_is(activation: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 5), activation())
    summary = summarize(model, (torch.empty(1, 1, 16, 16),))
    assert summary.modules[0].receptive_field == (5, 5)


@pytest.mark.parametrize("name", NETWORKS)
def test_equals_the_gradient_of_one_output(name: str) -> None:
    model = with_ones(nn.Sequential(*NETWORKS[name]))
    summary = summarize(model, (torch.empty(1, 1, 64, 64, dtype=torch.float64),))
    assert summary.modules[0].receptive_field == reached(model, 64)


def test_channels_last_and_linear_layers() -> None:
    summary = summarize(Swapped(), (torch.empty(1, 1, 32, 32),))
    assert [row.receptive_field for row in summary.modules[1:]] == [(5, 5), (7, 7), (5, 5), (5, 5)]


# Araujo et al. 2019, https://distill.pub/2019/computing-receptive-fields, of the last layer before the
# pooling over all positions; ResNet-18 by their recurrence.
@pytest.mark.parametrize(
    ("name", "layer", "side"),
    [
        ("alexnet", "features", 195),
        ("vgg16", "features", 212),
        ("resnet18", "layer4", 435),
        ("inception_v3", "Mixed_7c", 1311),
        ("densenet121", "features", 2071),
    ],
)
def test_networks_of_the_paper(name: str, layer: str, side: int) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name, weights=None, **extra(name))
        summary = summarize(model, (torch.empty(1, 3, 299, 299),))
    (row,) = (row for row in summary.modules if row.name == layer)
    assert row.receptive_field == (side, side)


def extra(name: str) -> dict[str, bool]:
    return {"init_weights": False} if name == "inception_v3" else {}


@pytest.mark.parametrize(
    "last",
    [nn.AdaptiveAvgPool2d(1), nn.GroupNorm(1, 4), nn.LayerNorm([4, 8, 8])],
    ids=lambda module: type(module).__name__,
)
def test_what_sees_everything(last: nn.Module) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), last, nn.Conv2d(4, 4, 1))
    field = summarize(model, (torch.empty(1, 1, 8, 8),)).modules[0].receptive_field
    assert field == (None if isinstance(last, nn.GroupNorm) else ())


def test_what_cannot_be_followed_is_not_guessed() -> None:
    class Rolled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft2(x).real

    assert summarize(Rolled(), (torch.empty(1, 1, 8, 8),)).modules[0].receptive_field is None


def test_every_rule_is_of_an_operation_that_torch_has() -> None:
    for name in RULES:
        assert hasattr(torch.ops.aten, name) or hasattr(torch.ops.aten, f"_{name}"), name
