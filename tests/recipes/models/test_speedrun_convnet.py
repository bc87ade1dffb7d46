import numpy as np
import pytest
import torch
from torch import nn

from flambeau.recipes.models.speedrun_convnet import SpeedrunConvNet


def smooth_images(count: int, channels: int = 3, side: int = 12) -> torch.Tensor:
    small = torch.randn(count, channels, 5, 5, generator=torch.Generator().manual_seed(0))
    return nn.functional.interpolate(small, size=(side, side), mode="bicubic")


@pytest.mark.parametrize("channels", [1, 3])
def test_the_first_layer_makes_patches_uncorrelated(channels: int) -> None:
    images = smooth_images(400, channels)
    model = SpeedrunConvNet(channels, 4)
    model.init_from_images(images)
    assert model.whiten.bias is not None and not model.whiten.bias.any()
    out = model.whiten(images).detach().double().permute(0, 2, 3, 1).flatten(0, 2).numpy()
    half = 4 * channels
    np.testing.assert_allclose(out[:, :half], -out[:, half:])
    products = out[:, :half].T @ out[:, :half] / len(out)
    assert np.abs(products - np.diag(np.diag(products))).max() < 1e-3
    first = np.diag(products)[0]  # of the largest eigenvalue, beside which 0.0005 is nothing
    assert 0.999 < first <= 1


def test_convolutions_begin_as_identities_and_norms_have_no_learned_scale() -> None:
    torch.manual_seed(0)
    model = SpeedrunConvNet(3, 10)
    group = model.groups[1]
    assert isinstance(group.conv1, nn.Conv2d) and group.conv1.weight.shape == (256, 64, 3, 3)
    x = torch.randn(2, 64, 6, 6)
    torch.testing.assert_close(group.conv1(x)[:, :64], x)
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert fixed == {"whiten.weight"} | {
        f"groups.{n}.norm{k}.weight" for n in range(3) for k in (1, 2)
    }


def test_sizes() -> None:
    for side in (9, 28, 32, 64):
        assert SpeedrunConvNet(1, 7, widths=(8, 8, 16))(torch.zeros(2, 1, side, side)).shape == (
            2,
            7,
        )


def test_it_learns() -> None:
    torch.manual_seed(0)
    images = smooth_images(256, side=16)
    targets = (images.mean((1, 2, 3)) > 0).long()
    model = SpeedrunConvNet(3, 2, widths=(8, 16, 16))
    model.init_from_images(images)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(30):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), targets).backward()
        optimizer.step()
    model.eval()
    assert (model(images).argmax(1) == targets).float().mean() > 0.9


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="three widths"):
        SpeedrunConvNet(3, 10, widths=(8, 8))
    with pytest.raises(ValueError, match="at least 1"):
        SpeedrunConvNet(0, 10)
    with pytest.raises(ValueError, match="at least 9 x 9 px, got 8 x 12"):
        SpeedrunConvNet(1, 2)(torch.zeros(2, 1, 8, 12))
    with pytest.raises(ValueError, match="not finite"):
        SpeedrunConvNet(1, 2).init_from_images(torch.full((4, 1, 12, 12), float("nan")))
