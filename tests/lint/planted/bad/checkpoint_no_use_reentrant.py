# planted: line 14, torch.utils.checkpoint.checkpoint without use_reentrant warns; since torch 2.1
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class DeepNet(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x)
        return x
