# planted: line 9, torch.qr is deprecated; use torch.linalg.qr; since torch 1.8
import torch
import torch.nn as nn


class RandomProjection(nn.Module):
    def __init__(self, dim):
        super().__init__()
        q, _ = torch.qr(torch.randn(dim, dim))
        self.register_buffer("q", q)

    def forward(self, x):
        return x @ self.q
