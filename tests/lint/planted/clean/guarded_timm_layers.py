import torch.nn as nn

try:
    from timm.layers import DropPath
except ImportError:
    from timm.models.layers import DropPath


class Residual(nn.Module):
    def __init__(self, fn, rate=0.1):
        super().__init__()
        self.fn = fn
        self.drop = DropPath(rate)

    def forward(self, x):
        return x + self.drop(self.fn(x))
