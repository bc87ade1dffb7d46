"""A target network that follows slowly, a predictor, and no negative pairs."""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def mlp(a, h, b):
    return nn.Sequential(nn.Linear(a, h), nn.BatchNorm1d(h), nn.ReLU(), nn.Linear(h, b))


class BYOL(nn.Module):
    def __init__(self, inputs=20, d=16, momentum=0.97):
        super().__init__()
        self.online = mlp(inputs, 64, d)
        self.predictor = mlp(d, 32, d)
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)
        self.momentum = momentum

    def forward(self, a, b):
        pa = self.predictor(self.online(a))
        pb = self.predictor(self.online(b))
        with torch.no_grad():
            ta = self.target(a)
            tb = self.target(b)
        return (self.distance(pa, tb) + self.distance(pb, ta)).mean()

    @staticmethod
    def distance(p, t):
        return 2 - 2 * (F.normalize(p, dim=1) * F.normalize(t, dim=1)).sum(1)

    @torch.no_grad()
    def follow(self):
        for t, o in zip(self.target.parameters(), self.online.parameters()):
            t.data = self.momentum * t.data + (1 - self.momentum) * o.data


def view(x):
    keep = torch.rand_like(x) > 0.15
    return x * keep + 0.1 * torch.randn_like(x)


def main():
    torch.manual_seed(0)
    prototypes = torch.randn(12, 20) * 1.5
    model = BYOL()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1, momentum=0.9, weight_decay=1e-4)
    for step in range(80):
        x = prototypes[torch.randint(12, (64,))] + 0.5 * torch.randn(64, 20)
        loss = model(view(x), view(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.follow()
        print(f"step {step} loss {loss.item():.4f}")


main()
