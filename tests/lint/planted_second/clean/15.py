import torch
import torch.nn.functional as F

def warp(x, flow):
    b, _, h, w = x.shape
    ys, xs = torch.meshgrid(
        torch.linspace(-1, 1, h, device=x.device),
        torch.linspace(-1, 1, w, device=x.device),
        indexing="ij",
    )
    grid = torch.stack((xs, ys), -1).expand(b, h, w, 2) + flow.permute(0, 2, 3, 1)
    return F.grid_sample(x, grid, mode="bilinear", align_corners=True)
