"""A network for small images that learns within a few epochs, as in the records for CIFAR-10.

面向小图像、几个 epoch 就能学好的网络，与 CIFAR-10 速度纪录中的网络同类。

Source: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024 (arXiv:2404.00498), sections 3.1 to
3.3: a whitening first layer, convolutions that begin as identities, normalization without a learned scale.

Not for images above 64 px, nor for a long training: a residual network then ends with a better accuracy.
Call `init_from_images` once, before the optimizer is made.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

_IMAGES_AT_ONCE = 256  # bounds the memory for their patches
_MIN_SIZE = 9  # the first layer takes one pixel off, three halvings leave one
_EPS = 5e-4  # in the paper; added to eigenvalues, so that directions without variance do not become noise
_BATCHNORM_MOMENTUM = 0.4  # in the paper: a training has some hundred steps


class SpeedrunConvNet(nn.Module):
    """A fixed whitening layer, three groups of two 3x3 convolutions, the maximum over all pixels, a head.

    For three channels, ten classes and these widths 1,972,792 parameters, 1,440 of them fixed.

    Args:
        in_channels: of the images, at least 1.
        num_classes: at least 1.
        widths: channels of the groups; the records have (64, 256, 256) for 94 %, (128, 384, 384) for 95 %.

    Raises:
        ValueError: a number below 1, or not three widths.

    Example:
        >>> model = SpeedrunConvNet(3, 10)
        >>> images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        >>> model.init_from_images(images)
        >>> model(images).shape
        torch.Size([64, 10])
    """

    def __init__(
        self, in_channels: int, num_classes: int, *, widths: Sequence[int] = (64, 256, 256)
    ) -> None:
        super().__init__()
        if len(widths) != 3 or min(in_channels, num_classes, *widths) < 1:
            raise ValueError(
                "in_channels, num_classes and the three widths must be at least 1, "
                f"got {in_channels}, {num_classes} and {tuple(widths)}"
            )
        whitened = 2 * in_channels * 2 * 2
        self.whiten = nn.Conv2d(in_channels, whitened, 2)
        self.whiten.weight.requires_grad_(False)
        first, second, third = widths
        self.groups = nn.Sequential(
            _Group(whitened, first), _Group(first, second), _Group(second, third)
        )
        self.head = nn.Linear(third, num_classes, bias=False)
        with torch.no_grad():
            assert self.whiten.bias is not None
            self.whiten.bias.zero_()
            self.head.weight.normal_()

    def init_from_images(self, images_NCHW: Tensor) -> None:
        """Make the first layer from normalized training images, (N, C, H, W); some thousand do.

        Each eigenvector of the mean products of their 2 x 2 patches, divided by the root of its eigenvalue,
        is a filter, and so is its opposite: GELU cuts one side of each.

        Raises:
            ValueError: some pixel is not finite.
        """
        size = self.whiten.in_channels * 2 * 2
        products = images_NCHW.new_zeros(size, size, dtype=torch.float64)
        for images in images_NCHW.split(_IMAGES_AT_ONCE):
            patches = images.double().unfold(2, 2, 1).unfold(3, 2, 1)  # (n, C, H - 1, W - 1, 2, 2)
            rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(-1, size)
            products += rows.T @ rows / len(rows) * len(images) / len(images_NCHW)
        if not bool(products.isfinite().all()):
            raise ValueError("some image has numbers that are not finite (inf or NaN)")
        values, vectors = torch.linalg.eigh(products)
        # The largest component of each is positive: an eigenvector's sign is that of the library otherwise.
        largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
        filters = (vectors * largest.sign() / (values.clamp(min=0) + _EPS).sqrt()).T.flip(0)
        with torch.no_grad():
            self.whiten.weight.copy_(torch.cat([filters, -filters]).view_as(self.whiten.weight))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Logits of shape (N, num_classes).

        Args:
            x_NCHW: floating-point, normalized, H and W at least 9.

        Raises:
            ValueError: smaller images.
        """
        _check_size(x_NCHW)
        x = self.groups(F.gelu(self.whiten(x_NCHW)))
        features = F.max_pool2d(x, x.shape[-2:]).flatten(1)
        logits: Tensor = self.head(features) / features.shape[1]
        return logits


class _Group(nn.Module):
    """A convolution, max-pooling by 2, another convolution, with normalization and GELU after each."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, channels)
        self.norm1 = _norm(channels)
        self.conv2 = _conv(channels, channels)
        self.norm2 = _norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


@fx.wrap  # so that torch.fx follows the rest of forward
def _check_size(x_NCHW: Tensor) -> None:
    height, width = x_NCHW.shape[-2:]
    if min(height, width) < _MIN_SIZE:
        raise ValueError(
            f"images must be at least {_MIN_SIZE} x {_MIN_SIZE} px, got {height} x {width}: enlarge them"
        )


def _conv(in_channels: int, channels: int) -> nn.Conv2d:
    """Its first filters pass the channels on as they are, as far as there are as many."""
    conv = nn.Conv2d(in_channels, channels, 3, padding=1, bias=False)
    nn.init.dirac_(conv.weight[: min(in_channels, channels)])
    return conv


def _norm(channels: int) -> nn.BatchNorm2d:
    """Without a learned scale, which slows the first epochs."""
    norm = nn.BatchNorm2d(channels, momentum=_BATCHNORM_MOMENTUM)
    norm.weight.requires_grad_(False)
    return norm
