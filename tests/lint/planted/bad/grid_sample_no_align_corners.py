# planted: line 13, F.grid_sample without align_corners: the default changed from True to False; since torch 1.3
import torch
import torch.nn.functional as F


def warp(x, flow):
    b, _, h, w = x.shape
    ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    grid = torch.stack([xs, ys], dim=-1).float().to(x.device)
    grid = grid + flow.permute(0, 2, 3, 1)
    gx = 2 * grid[..., 0] / (w - 1) - 1
    gy = 2 * grid[..., 1] / (h - 1) - 1
    return F.grid_sample(x, torch.stack([gx, gy], -1))
