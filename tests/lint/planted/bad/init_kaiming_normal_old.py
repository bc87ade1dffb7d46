# planted: line 13, nn.init.kaiming_normal is deprecated; use kaiming_normal_; since torch 0.4
import torch
from torch import nn


class WideBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(cout)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal(m.weight, mode="fan_out")

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))
