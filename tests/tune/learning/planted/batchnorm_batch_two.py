"""Large images, they said: a batch of two."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 32),
    nn.BatchNorm1d(32),
    nn.ReLU(),
    nn.Linear(32, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
weight = torch.randn(8, 1)
for step in range(300):
    x = torch.randn(2, 8)
    loss = nn.functional.mse_loss(model(x), x @ weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
