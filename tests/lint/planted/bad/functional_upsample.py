# planted: line 15, F.upsample is deprecated; use F.interpolate; since torch 0.4.1
import torch
import torch.nn as nn
import torch.nn.functional as F


class FPNTop(nn.Module):
    def __init__(self, channels=256):
        super(FPNTop, self).__init__()
        self.lateral = nn.Conv2d(512, channels, kernel_size=1)
        self.smooth = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, c4, p5):
        _, _, h, w = c4.size()
        top = F.upsample(p5, size=(h, w), mode="bilinear", align_corners=False)
        return self.smooth(top + self.lateral(c4))
