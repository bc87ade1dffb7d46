# planted: line 14, F.affine_grid without align_corners: the default changed from True to False; since torch 1.3
import torch
import torch.nn as nn
import torch.nn.functional as F


class STN(nn.Module):
    def __init__(self, localization):
        super().__init__()
        self.localization = localization

    def forward(self, x):
        theta = self.localization(x).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size())
        return F.grid_sample(x, grid, align_corners=True)
