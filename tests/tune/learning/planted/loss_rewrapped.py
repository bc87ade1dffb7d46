"""Keep the losses of a batch, then average them."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
true_weight = torch.randn(6, 1)

for step in range(80):
    losses = []
    for _ in range(4):
        x = torch.randn(16, 6)
        y = x @ true_weight
        losses.append(nn.functional.mse_loss(model(x), y))
    values = [part.item() for part in losses]
    total = torch.tensor(values, requires_grad=True).mean()
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {total.item():.4f}")
