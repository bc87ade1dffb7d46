import torch
from torch import nn


class Ensemble:
    """Not a module: trains its members one by one."""

    def __init__(self, n):
        self.members = [nn.Linear(4, 1) for _ in range(n)]

    def predict(self, x):
        return torch.stack([member(x) for member in self.members]).mean(0)
