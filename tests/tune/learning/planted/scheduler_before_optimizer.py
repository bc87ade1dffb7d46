"""Exponential decay of the rate."""

import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore", category=UserWarning)
torch.manual_seed(0)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
weight = torch.randn(16, 1)
step = 0
for _ in range(6):
    scheduler.step()
    for _ in range(12):
        x = torch.randn(32, 16)
        loss = nn.functional.mse_loss(model(x), x @ weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
