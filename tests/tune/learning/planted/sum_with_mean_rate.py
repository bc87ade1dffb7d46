"""Regression by SGD."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
criterion = nn.MSELoss(reduction="sum")
weight = torch.randn(12, 1)
for step in range(80):
    x = torch.randn(128, 12)
    y = x @ weight
    loss = criterion(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {nn.functional.mse_loss(model(x), y).item():.4f}")
