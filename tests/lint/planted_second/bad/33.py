import torch
import torch.nn.functional as F

def warp(x, flo):
    b, c, h, w = x.size()
    yy, xx = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    grid = torch.stack((xx, yy), 0).float().unsqueeze(0).to(x.device) + flo
    gx = 2.0 * grid[:, 0] / max(w - 1, 1) - 1.0
    gy = 2.0 * grid[:, 1] / max(h - 1, 1) - 1.0
    return F.grid_sample(x, torch.stack((gx, gy), 3))
