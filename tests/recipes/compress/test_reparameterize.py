"""Fused blocks against their branches, in float64; and the models of timm that have a way to fuse."""

import copy
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from flambeau.recipes.compress.reparameterize import (
    ConvBranches,
    acnet_block,
    reparameterize,
    repvgg_block,
)


def trained(model: Any) -> Any:
    """Nothing is 0 or 1 any more."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.3)
    return model.eval()


def noise(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_definition(block: ConvBranches, x: Tensor) -> Tensor:
    """The branches one by one, with BatchNorm written out."""
    branches = [(conv(x), norm) for conv, norm in zip(block.convs, block.norms, strict=True)]
    branches += [(x, block.identity_norm)] if block.identity_norm is not None else []
    total = torch.zeros(())
    for y, norm in branches:
        assert isinstance(norm, nn.BatchNorm2d)
        mean, var, gamma, beta = (
            t[:, None, None]
            for t in (norm.running_mean, norm.running_var, norm.weight, norm.bias)
            if t is not None
        )
        total = total + (y - mean) / (var + norm.eps).sqrt() * gamma + beta
    return total


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("num_out", [8, 16])
def test_repvgg(groups: int, stride: int, dilation: int, num_out: int) -> None:
    block = repvgg_block(8, num_out, stride=stride, groups=groups, dilation=dilation)
    trained(block.double())
    assert (block.identity_norm is not None) == (stride == 1 and num_out == 8)
    x = noise(2, 8, 9, 10)
    y = block(x)
    assert y.shape == (2, num_out, -(-9 // stride), -(-10 // stride))
    assert_close(y, by_definition(block, x), rtol=0, atol=1e-10)
    fused = block.fuse()
    assert type(fused) is nn.Conv2d
    assert_close(fused(x), y, rtol=0, atol=1e-10)
    assert_close(block.float().fuse()(x.float()), y.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("kernel_size", "stride", "dilation"), [(3, 1, 1), (3, 2, 2), (5, 2, 1)])
def test_acnet(groups: int, kernel_size: int, stride: int, dilation: int) -> None:
    settings = {"stride": stride, "groups": groups, "dilation": dilation}
    block = trained(acnet_block(8, 12, kernel_size=kernel_size, **settings).double())
    x = noise(2, 8, 9, 10)
    assert_close(block(x), by_definition(block, x), rtol=0, atol=1e-10)
    assert_close(block.fuse()(x), block(x), rtol=0, atol=1e-10)


def test_the_kernel_of_acnet_is_a_cross_on_a_square() -> None:
    """With BatchNorm as it begins, the kernel is the sum of the three, and the skeleton has two or three."""
    block = acnet_block(1, 1).double().eval()
    for conv in block.convs:
        nn.init.ones_(conv.weight)
    kernel = block.fuse().weight[0, 0] * (1 + 1e-5) ** 0.5
    cross = torch.tensor([[1, 2, 1], [2, 3, 2], [1, 2, 1]], dtype=torch.float64)
    assert_close(kernel, cross, rtol=1e-9, atol=0)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = repvgg_block(3, 8, stride=2)
        self.body = nn.Sequential(acnet_block(8, 8), nn.ReLU(), repvgg_block(8, 8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(F.relu(self.stem(x)))


def test_a_whole_model() -> None:
    model = trained(Small().double())
    before = copy.deepcopy(model.state_dict())
    x = noise(2, 3, 16, 16)
    result, fused = reparameterize(model, x)
    assert fused == ["stem", "body.0", "body.2"]
    assert_close(result(x), model(x), rtol=0, atol=1e-10)
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [type(m) for m in result.get_submodule("body")] == [nn.Conv2d, nn.ReLU] * 2  # type: ignore[attr-defined]
    assert sum(p.numel() for p in result.parameters()) == 3 * 8 * 9 + 2 * 8 * 8 * 9 + 3 * 8


def test_gradients_of_the_training_form_reach_every_branch() -> None:
    model = Small()
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def check_timm(name: str, size: int = 64) -> None:
    model = trained(timm.create_model(name, num_classes=10))
    x = noise(2, 3, size, size)
    result, fused = reparameterize(model, x.float())
    assert fused
    assert len(result.state_dict()) < len(model.state_dict())
    with torch.no_grad():
        expected = model.double()(x)
        assert float(expected.std()) > 1e-4
        scale = float(expected.abs().max())
        assert_close(result.double()(x), expected, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ["repvgg_a0", "repghostnet_050"])
def test_models_of_timm(name: str) -> None:
    check_timm(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mobileone_s0", "repvit_m0_9", "levit_128s", "fastvit_t8", "ghostnetv3_050", "efficientvit_m0"],
)  # fmt: skip
def test_more_models_of_timm(name: str) -> None:
    check_timm(name, 224)


def test_bfloat16_stays_bfloat16() -> None:
    model = trained(Small()).bfloat16()
    result = reparameterize(model, noise(1, 3, 8, 8).bfloat16()).model
    assert {t.dtype for t in result.state_dict().values()} == {torch.bfloat16}


class Wrong(nn.Sequential):
    def fuse(self) -> nn.Module:
        return nn.Identity()


class Deploys(nn.Conv2d):
    def switch_to_deploy(self) -> None:
        self.bias = None


def test_refusals() -> None:
    x = torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match="call eval"):
        reparameterize(Small(), x)
    with pytest.raises(ValueError, match="no module has a method fuse"):
        reparameterize(nn.Sequential(nn.Conv2d(3, 3, 1)).eval(), x)
    for wrong in (Wrong(nn.Conv2d(3, 3, 1)), Deploys(3, 3, 1)):
        with pytest.raises(ValueError, match=r"fused at \['0'\] the model gives something else"):
            reparameterize(nn.Sequential(wrong).eval(), x)
    with pytest.raises(ValueError, match=r"odd sizes, .* got \[\(3, 3\), \(2, 2\)\]"):
        ConvBranches(3, 3, kernel_sizes=[(3, 3), (2, 2)])
    with pytest.raises(ValueError, match="none above those of the first"):
        ConvBranches(3, 3, kernel_sizes=[(1, 1), (3, 3)])
    with pytest.raises(ValueError, match="got stride 2, 3 and 3 channels"):
        ConvBranches(3, 3, kernel_sizes=[(3, 3)], identity=True, stride=2)


def test_a_block_without_branches_is_refused() -> None:
    with pytest.raises(ValueError, match="kernel_sizes is empty"):
        ConvBranches(4, 4, kernel_sizes=[])
