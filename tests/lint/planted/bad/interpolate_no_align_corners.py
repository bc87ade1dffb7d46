# planted: line 10, nn.Upsample bilinear without align_corners: the default became False in silence; since torch 0.4
import torch
import torch.nn as nn


class Decoder(nn.Module):
    def __init__(self, cin, classes):
        super().__init__()
        self.conv = nn.Conv2d(cin, classes, 1)
        self.up = nn.Upsample(scale_factor=4, mode="bilinear")

    def forward(self, x):
        return self.up(self.conv(x))
