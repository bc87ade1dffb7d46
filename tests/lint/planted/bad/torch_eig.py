# planted: line 6, torch.eig was removed; use torch.linalg.eig; since torch 2.0
import torch


def spectral_radius(weight):
    eigenvalues, _ = torch.eig(weight)
    return torch.sqrt(eigenvalues[:, 0] ** 2 + eigenvalues[:, 1] ** 2).max()


class Reservoir(torch.nn.Module):
    def __init__(self, n=200, rho=0.9):
        super().__init__()
        w = torch.rand(n, n) - 0.5
        self.register_buffer("w", w * rho / spectral_radius(w))
