"""Weight two losses."""

import torch
from torch import nn

torch.manual_seed(0)
STEPS = 80
model = nn.Linear(12, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
weight = torch.randn(12, 4)
for step in range(STEPS):
    x = torch.randn(64, 12)
    fit = nn.functional.mse_loss(model(x), x @ weight)
    size = model.weight.square().mean()
    share = step // STEPS
    loss = share * fit + 0.001 * size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {fit.item():.4f}")
