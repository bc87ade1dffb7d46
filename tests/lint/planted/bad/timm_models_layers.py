# planted: line 4, timm.models.layers is deprecated; use timm.layers; since timm 0.9
import torch
import torch.nn as nn
from timm.models.layers import DropPath, trunc_normal_


class Block(nn.Module):
    def __init__(self, dim, drop_path=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Linear(dim, dim)
        self.drop_path = DropPath(drop_path)
        trunc_normal_(self.mlp.weight, std=0.02)

    def forward(self, x):
        return x + self.drop_path(self.mlp(self.norm(x)))
