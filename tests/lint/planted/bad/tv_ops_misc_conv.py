# planted: line 9, torchvision.ops.misc.Conv2d was removed; use torch.nn.Conv2d; since torchvision 0.13
import torch
import torchvision.ops.misc as misc


class SmallHead(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = misc.Conv2d(channels, channels, 3, padding=1)
        self.act = torch.nn.ReLU()

    def forward(self, x):
        return self.act(self.conv(x))
