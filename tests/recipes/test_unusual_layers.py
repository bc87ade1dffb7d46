"""Layers that compute more than their class: changed as they are, left with a reason, or refused by name."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune, spectral_norm
from torch.testing import assert_close

from flambeau.recipes.compress.fake_quantize import fake_quantize
from flambeau.recipes.compress.fold_batchnorm import fold_batchnorm, fold_pair
from flambeau.recipes.compress.reparameterize import reparameterize, repvgg_block
from flambeau.recipes.models.classifier_head import find_head, replace_head


class TwoNames(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)
        self.classifier = self.head

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.classifier(self.first(x))
        return result


class ByKeyword(nn.Module):
    """Calls its layers by keyword, with an argument beside the input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 3, 3, stride=2)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(input=self.up(input=x, output_size=(16, 16)))
        return result


def test_layers_may_be_called_by_keyword() -> None:
    x = torch.randn(2, 4, 7, 7, generator=torch.Generator().manual_seed(0))
    model = ByKeyword().eval()
    nn.init.uniform_(model.norm.running_var, 0.5, 2.0)
    folded = fold_batchnorm(model, x)
    assert folded.folded == {"norm": "up"}
    assert_close(folded.model(x), model(x))
    rounded = fake_quantize(model, [x]).model(x)
    assert_close(rounded, model(x), atol=0.05, rtol=0)


@pytest.mark.parametrize("size", [1e-9, 1e30])
def test_ranges_of_any_size(size: float) -> None:
    x = torch.linspace(-1, 1, 8).view(2, 4)
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    expected = model(x)
    rounded = fake_quantize(model, [x * 1e-6]).model(x * 1e-6) * 1e6
    assert_close(rounded, expected, atol=0.05, rtol=0)
    nn.init.constant_(model[0].weight, size)
    assert_close(
        fake_quantize(model, [x]).model(x) / size, x.sum(1, True).expand(2, 3), atol=0.05, rtol=0
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_range_is_chosen_for_values_that_are_not_finite(value: float) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"'0'.*NaN or infinite"):
        fake_quantize(model, [torch.full((2, 4), value)])
    nn.init.constant_(model[0].weight, value)
    with pytest.raises(ValueError, match=r"'0'.*NaN or infinite"):
        fake_quantize(model, [torch.ones(2, 4)])


def test_what_cannot_be_rounded_is_named() -> None:
    x = torch.ones(2, 4)
    linear = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="'0' got no values"):
        fake_quantize(linear, [x[:0]])
    with pytest.raises(ValueError, match="already: 0"):
        fake_quantize(fake_quantize(linear, [x]).model, [x])
    with pytest.raises(ValueError, match="'0' has no shape yet"):
        fake_quantize(nn.Sequential(nn.LazyLinear(3)), [x])
    with pytest.raises(ValueError, match="a hook computes the weight of '0'"):
        fake_quantize(nn.Sequential(spectral_norm(nn.Linear(4, 3))), [x])
    assert fake_quantize(TwoNames(), [x], skip=["classifier"]).left == {"head": "skipped"}


def test_an_example_that_shows_nothing_proves_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    assert "shows nothing" in fold_batchnorm(model, torch.ones(0, 4)).left["1"]
    blocks = nn.Sequential(repvgg_block(4, 4)).eval()
    for x in (torch.ones(0, 4, 5, 5), torch.full((1, 4, 5, 5), float("nan"))):
        with pytest.raises(ValueError, match="cannot show"):
            reparameterize(blocks, x)


def test_computed_weights_are_not_folded() -> None:
    norm = nn.BatchNorm1d(3)
    for change in (parametrizations.weight_norm, spectral_norm):
        with pytest.raises(ValueError, match="computed from others"):
            fold_pair(change(nn.Linear(4, 3)), norm)
    pruned = prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5)
    with pytest.raises(ValueError, match="a hook computed the weight of '0'"):
        fold_batchnorm(nn.Sequential(pruned, norm).eval(), torch.ones(2, 4))


def test_heads_under_a_second_name_or_with_a_parametrization() -> None:
    model = TwoNames()
    head = replace_head(model, 7, head="classifier")
    assert head.parameters == ["head.weight", "head.bias"]
    assert model(torch.ones(2, 4)).shape == (2, 7)
    normed = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 3)))
    assert find_head(normed).layers == ["1"]
