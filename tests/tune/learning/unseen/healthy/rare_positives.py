"""One sample of thirty is positive; the last bias starts at the prior."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FraudNet(nn.Module):
    def __init__(self, inputs, prior):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.out = nn.Linear(32, 1)
        nn.init.constant_(self.out.bias, math.log(prior / (1 - prior)))

    def forward(self, x):
        return self.out(self.net(x)).squeeze(1)


def focal(logits, y, gamma=2.0):
    ce = nn.functional.binary_cross_entropy_with_logits(logits, y, reduction="none")
    p = torch.exp(-ce)
    return ((1 - p) ** gamma * ce).mean()


def transactions(n):
    x = torch.randn(n, 9)
    y = (x[:, 0] + x[:, 1] - x[:, 2] > 3.1).float()
    return x, y


torch.manual_seed(0)
x, y = transactions(6000)
model = FraudNet(9, y.mean().item())
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
step = 0
for epoch in range(2):
    for bx, by in DataLoader(TensorDataset(x, y), batch_size=100, shuffle=True):
        loss = focal(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.5f}")
        step += 1
