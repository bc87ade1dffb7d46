import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        layers = []
        for a, b in zip(sizes[:-1], sizes[1:], strict=True):
            layers.append(nn.Linear(a, b))
            layers.append(nn.GELU())
        self.body = nn.Sequential(*layers)
        self.heads = nn.ModuleList([nn.Linear(sizes[-1], 1) for _ in range(3)])

    def forward(self, x):
        x = self.body(x)
        return torch.cat([head(x) for head in self.heads], dim=1)
