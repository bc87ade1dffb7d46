# planted: line 14, torch.ger is an old name; use torch.outer; since torch 1.8
import torch
from torch import nn


class HebbianLayer(nn.Module):
    def __init__(self, n_in, n_out, eta=0.01):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_out, n_in), requires_grad=False)
        self.eta = eta

    def forward(self, x):
        y = self.weight @ x
        self.weight += self.eta * torch.ger(y, x)
        return y
