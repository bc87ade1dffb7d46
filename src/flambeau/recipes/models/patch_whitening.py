"""A fixed first convolution that makes the small patches of your images uncorrelated and equally large.

固定的第一层卷积：让图像小块的各分量互不相关、方差相同（白化）。

Source: Page, "How to train your ResNet 8: bag of tricks", 2019 (a whitening first layer); Jordan, "94% on
CIFAR-10 in 3.29 seconds on a single GPU", 2024 (arXiv:2404.00498), section 3.1: 2 x 2 patches, each filter
also with the opposite sign, 0.0005 added to the eigenvalues.

Not for large photographs, whose first layer has a stride and filters of 7 x 7 that are better trained, nor
for pretrained models. Normalize images as in training before they are given.
"""

import torch
from torch import Tensor, nn

_IMAGES_AT_ONCE = 256  # bounds the memory for their patches


def patch_whitening(
    images_NCHW: Tensor, *, kernel_size: int = 2, bias: bool = True, eps: float = 5e-4
) -> nn.Conv2d:
    """The first layer of a network, made from some thousand of its training images.

    Of all patches of k x k pixels the matrix of mean products is decomposed; each eigenvector, divided by
    the root of its eigenvalue, is a filter, and so is its opposite, because an activation that cuts off
    negative values keeps one side of each. The filters come in the order of falling eigenvalues, then their
    opposites.

    Args:
        images_NCHW: (N, C, H, W) floating point, normalized, from the training data; 2,000 to 5,000 do.
        kernel_size: k, 2 or 3 for images of 32 x 32.
        bias: whether the layer has a bias, 0 at first, which is trained.
        eps: added to eigenvalues, so that directions without variance do not become noise.

    Returns:
        `nn.Conv2d(C, 2 * C * k * k, k)` without padding, float32, on the device of the images; its weight is
        frozen (`requires_grad` is False).

    Raises:
        TypeError: the images are not floating point.
        ValueError: they are not (N, C, H, W), none, smaller than a patch or not finite; `eps` is not above 0.

    Example:
        >>> images = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> layer = patch_whitening(images)
        >>> tuple(layer.weight.shape), layer.weight.requires_grad
        ((24, 3, 2, 2), False)
        >>> bool((layer.weight[:12] == -layer.weight[12:]).all())
        True
    """
    if images_NCHW.ndim != 4 or min(images_NCHW.shape[:2]) < 1:
        raise ValueError(f"images must be (N, C, H, W), got {tuple(images_NCHW.shape)}")
    if not images_NCHW.is_floating_point():
        raise TypeError(f"images must be floating point and normalized, got {images_NCHW.dtype}")
    if not 1 <= kernel_size <= min(images_NCHW.shape[2:]):
        sides = tuple(images_NCHW.shape[2:])
        raise ValueError(
            f"kernel_size must be 1 to {min(sides)} for images of {sides}, got {kernel_size}"
        )
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")
    channels = images_NCHW.shape[1]
    values, vectors = torch.linalg.eigh(_mean_products(images_NCHW, kernel_size))
    # The largest component of each is positive: an eigenvector's sign is that of the library otherwise.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    filters = (vectors * largest.sign() / (values.clamp(min=0) + eps).sqrt()).T.flip(0)
    layer = nn.Conv2d(channels, 2 * len(filters), kernel_size, bias=bias, device=images_NCHW.device)
    layer.to(torch.float32)
    with torch.no_grad():
        both = torch.cat([filters, -filters])
        layer.weight.copy_(both.view_as(layer.weight))
        if layer.bias is not None:
            layer.bias.zero_()
    layer.weight.requires_grad_(False)
    return layer


def _mean_products(images_NCHW: Tensor, side: int) -> Tensor:
    """(C k k, C k k) float64: over all patches, the mean product of each two of their numbers."""
    total: Tensor | None = None
    count = 0
    for images in images_NCHW.detach().split(_IMAGES_AT_ONCE):
        patches = images.double().unfold(2, side, 1).unfold(3, side, 1)  # (n, C, H', W', k, k)
        rows = patches.permute(0, 2, 3, 1, 4, 5).flatten(0, 2).flatten(1)
        products = rows.T @ rows
        total = products if total is None else total + products
        count += len(rows)
    assert total is not None
    mean = total / count
    if not bool(mean.isfinite().all()):
        raise ValueError("some image has numbers that are not finite (inf or NaN)")
    return mean
