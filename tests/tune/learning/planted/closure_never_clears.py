"""Fit a curve with LBFGS."""

import torch
from torch import nn

torch.manual_seed(0)
x = torch.linspace(-3, 3, 200)[:, None]
y = torch.sin(2 * x)
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)


def closure():
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss


for step in range(60):
    loss = optimizer.step(closure)
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
