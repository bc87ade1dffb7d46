import torch
import torch.nn as nn

class PosGrid(nn.Module):
    def __init__(self, h, w):
        super().__init__()
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w))
        self.register_buffer("grid", torch.stack([x, y]).float())

    def forward(self, offset):
        return self.grid.unsqueeze(0) + offset
