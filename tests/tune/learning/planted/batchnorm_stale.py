"""Momentum was read as that of the optimizer."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 32),
    nn.BatchNorm1d(32, momentum=0.0001),
    nn.ReLU(),
    nn.Linear(32, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
weight = torch.randn(8, 1)


def batch():
    x = 5 * torch.randn(64, 8) + 10
    return x, (x - 10) @ weight / 5


for step in range(100):
    model.train()
    x, y = batch()
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        model.eval()
        with torch.no_grad():
            x, y = batch()
            print(f"step {step} loss {nn.functional.mse_loss(model(x), y).item():.4f}")
