import torch.nn as nn
from timm.models.layers import DropPath, trunc_normal_

class Block(nn.Module):
    def __init__(self, dim, drop_path=0.1):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop_path = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        for m in self.mlp:
            if isinstance(m, nn.Linear):
                trunc_normal_(m.weight, std=0.02)

    def forward(self, x):
        return x + self.drop_path(self.mlp(self.norm(x)))
