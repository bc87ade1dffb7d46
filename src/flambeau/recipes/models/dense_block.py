"""A DenseNet block whose concatenations, BatchNorms and ReLUs are recomputed in the backward pass.

DenseNet 稠密块：拼接、BatchNorm 与 ReLU 的结果不保存，在反向传播时重新计算。

Source: Pleiss et al., "Memory-efficient implementation of DenseNets", 2017, section 3 (arXiv:1707.06990);
Huang et al., "Densely connected convolutional networks", CVPR 2017 (arXiv:1608.06993), for the block.

Not for second derivatives, nor for BatchNorm over several processes. If memory is sufficient, torchvision's
block does the same with less code.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class DenseBlock(nn.ModuleDict):
    """Layers that each read the outputs of all before them: BN-ReLU-1x1-BN-ReLU-3x3, then concatenation.

    In a plain block each layer keeps its concatenated and its normalized input, so that the memory of L
    layers grows with L squared. Here both are recomputed, one layer at a time, and memory grows with L. The
    statistics of BatchNorm are computed and updated once. Names and shapes are those of torchvision's blocks,
    so their weights load.

    Args:
        num_layers: L, at least 1.
        in_channels: of the input.
        growth_rate: k, channels that each layer adds.
        bottleneck: the 1x1 convolution has bottleneck * k output channels.
        dropout: in [0, 1), on the new channels of each layer.

    Raises:
        ValueError: a number out of range.
        TypeError: in forward, if `norm1` of a layer is no longer an nn.BatchNorm2d (SyncBatchNorm).

    Example:
        >>> block = DenseBlock(3, 8, growth_rate=4)
        >>> block(torch.randn(2, 8, 5, 5)).shape
        torch.Size([2, 20, 5, 5])
    """

    def __init__(
        self,
        num_layers: int,
        in_channels: int,
        *,
        growth_rate: int,
        bottleneck: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if min(num_layers, in_channels, growth_rate, bottleneck) < 1:
            raise ValueError("num_layers, in_channels, growth_rate and bottleneck are at least 1")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        for i in range(num_layers):
            layer = DenseLayer(
                in_channels + i * growth_rate,
                growth_rate=growth_rate,
                bottleneck=bottleneck,
                dropout=dropout,
            )
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) to (N, in_channels + L * k, H, W)."""
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseLayer(nn.Module):
    """One layer of the block.

    Args:
        in_channels: of all inputs together.
        growth_rate: channels of the output.
        bottleneck: the 1x1 convolution has bottleneck * growth_rate output channels.
        dropout: in [0, 1).

    Example:
        >>> layer = DenseLayer(6, growth_rate=4)
        >>> layer([torch.randn(2, 2, 5, 5), torch.randn(2, 4, 5, 5)]).shape
        torch.Size([2, 4, 5, 5])
    """

    def __init__(
        self, in_channels: int, *, growth_rate: int, bottleneck: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout = dropout
        width = bottleneck * growth_rate
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, growth_rate, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        """A list of (N, C_i, H, W) to (N, growth_rate, H, W)."""
        norm = self.norm1
        if not isinstance(norm, nn.BatchNorm2d):
            raise TypeError(f"norm1 must be an nn.BatchNorm2d, got {type(norm).__name__}")
        settings, stats = _settings(norm)
        x: Tensor = _CatNormReluConv.apply(
            settings, stats, norm.weight, norm.bias, self.conv1.weight, *features
        )
        x = self.conv2(F.relu(self.norm2(x), inplace=True))
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def _settings(norm: nn.BatchNorm2d) -> tuple[tuple[bool, float, float], tuple[Any, Any]]:
    """As nn.BatchNorm2d.forward before it calls the kernel: settings, and the running statistics to use."""
    momentum = norm.momentum
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if momentum is None:  # the mean over all batches
            momentum = 1.0 / int(norm.num_batches_tracked)
    by_batch = norm.training or norm.running_mean is None
    used = not norm.training or norm.track_running_stats
    stats = (norm.running_mean, norm.running_var) if used else (None, None)
    return (by_batch, momentum or 0.0, norm.eps), stats


class _CatNormReluConv(torch.autograd.Function):
    """conv1x1(relu(batch_norm(cat(features)))); keeps only the features, which are alive anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: tuple[bool, float, float],
        stats: tuple[Any, Any],
        gamma: Tensor,
        beta: Tensor,
        kernel: Tensor,
        *features: Tensor,
    ) -> Tensor:
        training, momentum, eps = settings
        joined = torch.cat(features, 1)
        z, mean, invstd = torch.native_batch_norm(
            joined, gamma, beta, *stats, training, momentum, eps
        )
        # Small copies, because the running statistics may change before the backward pass.
        if not training:
            mean = stats[0].clone()
            invstd = torch.rsqrt(stats[1] + eps)
        ctx.training, ctx.eps = training, eps
        ctx.save_for_backward(gamma, beta, kernel, mean, invstd, *features)
        return F.conv2d(z.relu_(), kernel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gamma, beta, kernel, mean, invstd, *features = ctx.saved_tensors
        training, eps = ctx.training, ctx.eps
        joined = torch.cat(features, 1)
        # With the statistics of the forward pass, and without updating the running ones.
        var = invstd.square().reciprocal()
        z = torch.native_batch_norm(joined, gamma, beta, mean, var, False, 0.0, 0.0)[0].relu_()
        # Under autocast the convolution ran in another dtype than that of its weight.
        cast = z.to(grad.dtype)
        weight = kernel.to(grad.dtype)
        one, zero = [1, 1], [0, 0]
        wanted = [True, ctx.needs_input_grad[4], False]
        grad_z, grad_kernel, _ = torch.ops.aten.convolution_backward(
            grad, cast, weight, None, one, zero, one, False, zero, 1, wanted
        )
        grad_z = grad_z.to(z.dtype).masked_fill_(z <= 0, 0)
        grad_joined, grad_gamma, grad_beta = torch.ops.aten.native_batch_norm_backward(
            grad_z,
            joined,
            gamma,
            mean,
            var,
            mean,
            invstd,
            training,
            0.0 if not training else eps,
            [True, *ctx.needs_input_grad[2:4]],
        )
        split = grad_joined.split([f.shape[1] for f in features], 1)
        return (None, None, grad_gamma, grad_beta, grad_kernel, *split)
