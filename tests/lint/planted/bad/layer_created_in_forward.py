# planted: line 14, a layer with weights created inside forward(): new random weights in each call; in all versions
import torch
import torch.nn as nn


class Projector(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.n_in = n_in
        self.norm = nn.LayerNorm(n_in)

    def forward(self, x):
        x = self.norm(x)
        proj = nn.Linear(self.n_in, 16).to(x.device)
        return proj(x)
