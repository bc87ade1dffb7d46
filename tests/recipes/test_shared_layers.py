"""A layer that a model has under two names is changed under both: the second may be the one that runs."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from flambeau.recipes.compress.fake_quantize import QuantizedLayer, fake_quantize, to_integers
from flambeau.recipes.compress.fold_batchnorm import fold_batchnorm
from flambeau.recipes.compress.prune_channels import prune_channels
from flambeau.recipes.compress.reparameterize import reparameterize
from flambeau.recipes.models.classifier_head import replace_head


class TwoNames(nn.Module):
    """Registers each layer twice, and calls it by its second name."""

    def __init__(self, block: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), block or nn.Identity(), nn.ReLU()
        )
        self.head = nn.Linear(8, 4)
        self.conv, self.norm, self.block = self.features[0], self.features[1], self.features[2]
        self.classifier = self.head

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.block(self.norm(self.conv(x)))
        logits: Tensor = self.classifier(maps.relu().mean((2, 3)))
        return logits


class Branches(nn.Module):
    """y = a x + b x, which becomes one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.a(x) + self.b(x)
        return result

    def fuse(self) -> nn.Module:
        fused = nn.Conv2d(8, 8, 1, bias=False)
        fused.weight = nn.Parameter(self.a.weight + self.b.weight)
        return fused


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_rounding_reaches_the_layers_that_run(x: Tensor) -> None:
    model = TwoNames().eval()
    result = fake_quantize(model, [x], weight_bits=2).model
    assert isinstance(result.conv, QuantizedLayer)
    assert result.conv is result.features[0]
    assert result.classifier is result.head
    assert (result(x) - model(x)).abs().max() > 0.01
    integers = to_integers(result)
    assert integers.classifier.weight_codes.dtype == torch.int8
    assert_close(integers(x), result(x))


def test_a_batchnorm_is_folded_under_both_names(x: Tensor) -> None:
    model = TwoNames().eval()
    with torch.no_grad():
        model.norm.running_mean += 0.5  # type: ignore[operator]
    result, folded, left = fold_batchnorm(model, x)
    assert (folded, left) == ({"features.1": "features.0"}, {})
    assert isinstance(result.norm, nn.Identity)
    assert_close(result(x), model(x))


def test_a_block_is_fused_once(x: Tensor) -> None:
    model = TwoNames(Branches()).eval()
    result, fused = reparameterize(model, x)
    assert fused == ["features.2"]
    assert isinstance(result.block, nn.Conv2d)
    assert result.block is result.features[2]
    assert_close(result(x), model(x))


def test_a_head_is_replaced_under_both_names(x: Tensor) -> None:
    model = TwoNames()
    assert replace_head(model, 7).layers == ["head"]
    assert model.classifier is model.head
    assert model(x).shape == (4, 7)


def test_channels_are_removed_under_both_names(x: Tensor) -> None:
    model = TwoNames().eval()
    result = prune_channels(copy.deepcopy(model), x, amount=0.5).model
    assert result.conv is result.features[0]
    assert result.conv.weight.shape[0] == 4  # type: ignore[union-attr]
    assert result(x).shape == (4, 4)
