# planted: line 11, torch.lstsq was removed; use torch.linalg.lstsq; since torch 1.13
import numpy as np
import torch


def fit_plane(points):
    pts = torch.as_tensor(points, dtype=torch.float32)
    ones = torch.ones(len(pts), 1)
    A = torch.cat([pts[:, :2], ones], dim=1)
    b = pts[:, 2:3]
    solution, _ = torch.lstsq(b, A)
    return solution[:3].squeeze(1).numpy()


print(fit_plane(np.random.rand(50, 3)))
