import torch
import torch.nn as nn
import torch.nn.functional as F

class Up(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.nearest = nn.Upsample(scale_factor=2)
        self.conv = nn.Conv2d(c, c, 3, padding=1)

    def forward(self, x, size):
        x = self.conv(self.nearest(x))
        return F.interpolate(x, size=size, mode="bilinear", align_corners=False)

print(Up(3)(torch.randn(1, 3, 8, 8), (20, 20)).shape)
