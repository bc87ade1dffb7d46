"""Bilinear pooling: the products of all pairs of channels, averaged over the image.

双线性池化：所有通道两两相乘，再在图像上取平均。

Source: Lin et al., "Bilinear CNN models for fine-grained visual recognition", ICCV 2015, section 3
(arXiv:1504.07889): outer product, sum over places, signed square root, L2 norm.

Not for many channels: 512 give 262,144 features per image, and a linear head on them for 200 classes has
52 million weights; reduce the channels by a 1x1 convolution first.
"""

# N images, C and D channels, L = H * W places.

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def bilinear_pooling(x: Tensor, y: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """The normalized mean over all places of the outer product of two feature vectors.

    z = mean of x y^T over the places; then z / sqrt(|z| + eps), which is sign(z) * sqrt(|z|) for |z| far
    above eps, continuous, and has a finite slope at 0; then division by the L2 norm.

    Args:
        x: (N, C, H, W) floating.
        y: (N, D, H, W) on the same device; None takes x itself.
        eps: above 0; the slope of the square root at 0 is 1/sqrt(eps), and a norm below sqrt(eps) is taken
            as sqrt(eps), so that an image without any activation gives zeros and finite gradients.

    Returns:
        (N, C * D), pair (c, d) at c * D + d, each row of L2 norm 1; float64 for float64 features, else
        float32, also under autocast: a sum of products soon passes 65504, the end of float16.

    Raises:
        ValueError: shapes that do not fit, no places, eps not above 0.
        TypeError: features that are not floating.

    Example:
        >>> x = torch.tensor([3.0, -4.0]).view(1, 2, 1, 1)
        >>> bilinear_pooling(x)
        tensor([[ 0.4286, -0.4949, -0.4949,  0.5714]])
    """
    y = x if y is None else y
    if x.ndim != 4 or y.ndim != 4 or (x.shape[0], x.shape[2:]) != (y.shape[0], y.shape[2:]):
        raise ValueError(
            f"features must be (N, C, H, W) and (N, D, H, W), got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if not x.shape[2:].numel():
        raise ValueError(f"features have no places to average over: {tuple(x.shape)}")
    if not eps > 0:
        raise ValueError(f"eps must be above 0, got {eps}")
    for features in (x, y):
        if not features.dtype.is_floating_point:
            raise TypeError(f"features must be floating, got {features.dtype}")
    # bmm would run in half precision; 'meta' knows no autocast.
    with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
        x_NCL = x.flatten(2).to(dtype)
        y_NDL = y.flatten(2).to(dtype)
        z = torch.bmm(x_NCL, y_NDL.transpose(1, 2)).flatten(1) / x_NCL.shape[2]
        z = z * torch.rsqrt(z.abs() + eps)
        return F.normalize(z, eps=eps**0.5)


class BilinearPooling(nn.Module):
    """`bilinear_pooling` as a layer, in the place of global average pooling and flatten.

    Args:
        eps: as for `bilinear_pooling`.

    Example:
        >>> head = nn.Sequential(nn.Conv2d(32, 8, 1), BilinearPooling(), nn.Linear(64, 10))
        >>> head(torch.randn(2, 32, 7, 7)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """(N, C, H, W) and, where given, (N, D, H, W) to (N, C * D)."""
        return bilinear_pooling(x, y, eps=self.eps)

    def extra_repr(self) -> str:
        """What print(module) shows of it."""
        return f"eps={self.eps}"
