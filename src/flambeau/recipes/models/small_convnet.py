"""A small residual network for small images, quick to train on a few CPU cores.

面向小图像的小型残差网络，用几个 CPU 核即可快速训练。

Source: original; residual blocks after He et al., "Deep residual learning", CVPR 2016, initialization after
He et al., "Delving deep into rectifiers", ICCV 2015, section 2.2.

Not for photographs: from about 100 px on, a network that downsamples earlier (ResNet) is cheaper.
"""

import torch.nn.functional as F
from torch import Tensor, fx, nn

_MIN_SIZE = 8  # three halvings leave one pixel


class SmallConvNet(nn.Module):
    """A 3x3 stem, three stages of max-pooling and a residual block, the mean over all pixels.

    Seven 3x3 convolutions with `width`, 2 `width` and 4 `width` channels and two 1x1 projections, each with
    batch normalization: 308,074 parameters for one channel and ten classes at width 32.

    Args:
        in_channels: of the images, at least 1.
        num_classes: at least 1.
        width: channels of stem and first stage, at least 1; multiples of 16 are fast.
        dropout: of the pooled features in training, in [0, 1).

    Raises:
        ValueError: a number outside its range.

    Example:
        >>> import torch
        >>> model = SmallConvNet(1, 10)
        >>> model(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
        >>> sum(parameter.numel() for parameter in model.parameters())
        308074
    """

    def __init__(
        self, in_channels: int, num_classes: int, *, width: int = 32, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if min(in_channels, num_classes, width) < 1:
            raise ValueError(
                "in_channels, num_classes and width must be at least 1, "
                f"got {in_channels}, {num_classes} and {width}"
            )
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.stem = _conv(in_channels, width, kernel=3)
        self.stages = nn.Sequential(
            _Stage(width, width), _Stage(width, 2 * width), _Stage(2 * width, 4 * width)
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Logits of shape (N, num_classes).

        Args:
            x_NCHW: floating-point, normalized, H and W at least 8.

        Raises:
            ValueError: smaller images.
        """
        _check_size(x_NCHW)
        features = self.stages(F.relu(self.stem(x_NCHW)))
        logits: Tensor = self.head(self.dropout(features.mean(dim=(2, 3))))
        return logits


class _Stage(nn.Module):
    """Max-pooling by 2, then a residual block."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, channels, kernel=3)
        self.conv2 = _conv(channels, channels, kernel=3)
        same = in_channels == channels
        self.shortcut = nn.Identity() if same else _conv(in_channels, channels, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(x, 2)
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


@fx.wrap  # so that torch.fx follows the rest of forward
def _check_size(x_NCHW: Tensor) -> None:
    height, width = x_NCHW.shape[-2:]
    if min(height, width) < _MIN_SIZE:
        raise ValueError(
            f"images must be at least {_MIN_SIZE} x {_MIN_SIZE} px, got {height} x {width}: enlarge them"
        )


def _conv(in_channels: int, channels: int, *, kernel: int) -> nn.Sequential:
    return nn.Sequential(
        # No bias: the normalization would subtract it again.
        nn.Conv2d(in_channels, channels, kernel, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(channels),
    )
