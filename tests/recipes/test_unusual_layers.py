"""Layers that compute more than their class: changed as they are, left with a reason, or refused by name."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.testing import assert_close

from flambeau.recipes.compress.low_bit import low_bit


class Standardized(nn.Conv2d):
    """The weights' mean is subtracted in forward, as in timm's StdConv2d."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.classifier = self.head

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.first(x))
        return result


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda *_: None)
    return layer


UNFIT: dict[str, Callable[[], nn.Module]] = {
    "a forward of its own": lambda: Standardized(4, 3, 3),
    "reads its weights": lambda: nn.MultiheadAttention(4, 2),
    "hooks": hooked,
    "no shape yet": lambda: nn.LazyLinear(3),
    "complex64": lambda: nn.Linear(4, 3, dtype=torch.complex64),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral_norm": lambda: spectral_norm(nn.Linear(4, 3)),
    "pruning": lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_few_bits_only_for_layers_that_compute_nothing_else(reason: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), UNFIT[reason]())
    with pytest.raises(TypeError, match=rf"'1[.\w]*', .*{reason}"):
        low_bit(model, "twn")


def test_few_bits_once_and_without_a_batch_dimension() -> None:
    x = torch.randn(4, 7, 7, generator=torch.Generator().manual_seed(0))
    model = low_bit(nn.Sequential(nn.Conv2d(4, 3, 3)), "xnor")
    assert_close(model(x), model(x[None])[0])
    with pytest.raises(ValueError, match="already: 0"):
        low_bit(model, "twn")


def test_a_layer_to_skip_may_have_its_second_name() -> None:
    model = low_bit(TwoNames(), "twn", skip=["classifier"])
    assert type(model.head) is nn.Linear
