"""Train with accumulated gradients."""

import torch
from torch import nn

torch.manual_seed(0)
ACCUMULATE = 8
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
weight = torch.randn(12, 1)
optimizer.zero_grad()
for step in range(320):
    x = torch.randn(8, 12)
    loss = nn.functional.mse_loss(model(x), x @ weight)
    loss.backward()
    if (step + 1) % ACCUMULATE == 0:
        optimizer.step()
        optimizer.zero_grad()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
