import numpy as np
import pytest
import torch

from flambeau.recipes.models import patch_whitening as module
from flambeau.recipes.models.patch_whitening import patch_whitening


def smooth_images(count: int, channels: int = 3, side: int = 12) -> torch.Tensor:
    """Images whose neighbouring pixels and channels are alike, of some brightness."""
    generator = torch.Generator().manual_seed(0)
    small = torch.randn(count, 1, 5, 5, generator=generator)
    colors = 0.4 * torch.randn(count, channels, 5, 5, generator=generator)
    return torch.nn.functional.interpolate(small + colors + 0.5, size=(side, side), mode="bicubic")


@pytest.mark.parametrize(("channels", "side"), [(3, 2), (1, 3), (4, 1)])
def test_what_comes_out_is_uncorrelated_and_of_size_one(channels: int, side: int) -> None:
    images = smooth_images(600, channels)
    layer = patch_whitening(images, kernel_size=side, eps=1e-9)
    out = layer(images).detach().double().permute(0, 2, 3, 1).flatten(0, 2).numpy()
    half = channels * side * side
    assert out.shape[1] == 2 * half
    products = out[:, :half].T @ out[:, :half] / len(out)
    np.testing.assert_allclose(products, np.eye(half), atol=2e-3)
    np.testing.assert_array_equal(out[:, :half], -out[:, half:])


def test_filters_are_those_of_numpy() -> None:
    images = smooth_images(5)
    patches = np.stack(
        [
            image[:, row : row + 2, column : column + 2].ravel()
            for image in images.double().numpy()
            for row in range(11)
            for column in range(11)
        ]
    )
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    weight = patch_whitening(images).weight.double().numpy()[:12].reshape(12, 12)
    for place, number in enumerate(reversed(range(12))):
        expected = vectors[:, number] / np.sqrt(values[number] + 5e-4)
        expected *= np.sign(expected[np.abs(expected).argmax()])
        np.testing.assert_allclose(weight[place], expected, rtol=1e-3, atol=1e-4)


def test_many_images_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    images = smooth_images(50).half()
    whole = patch_whitening(images)
    monkeypatch.setattr(module, "_IMAGES_AT_ONCE", 7)
    torch.testing.assert_close(patch_whitening(images).weight, whole.weight, rtol=1e-4, atol=1e-4)
    assert whole.weight.dtype == torch.float32 and not whole.weight.requires_grad
    assert whole.bias is not None and whole.bias.requires_grad and not whole.bias.any()


def test_constant_images_give_finite_filters() -> None:
    layer = patch_whitening(torch.ones(4, 3, 6, 6), bias=False)
    assert layer.bias is None and layer.weight.isfinite().all()
    assert layer.weight.abs().max() < 1 / 5e-4**0.5 + 1e-3


@pytest.mark.parametrize(
    ("images", "settings", "error", "message"),
    [
        (torch.zeros(3, 8, 8), {}, ValueError, r"must be \(N, C, H, W\), got \(3, 8, 8\)"),
        (torch.zeros(0, 3, 8, 8), {}, ValueError, "must be"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), {}, TypeError, "got torch.uint8"),
        (torch.zeros(2, 3, 2, 8), {"kernel_size": 3}, ValueError, "1 to 2 for images of"),
        (torch.zeros(2, 3, 8, 8), {"eps": 0.0}, ValueError, "eps must be above 0"),
        (torch.full((2, 3, 8, 8), float("nan")), {}, ValueError, "not finite"),
    ],
)
def test_what_is_refused(
    images: torch.Tensor, settings: dict[str, float], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        patch_whitening(images, **settings)  # type: ignore[arg-type]
