"""Warm the rate up over 100 steps."""

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

torch.manual_seed(0)
WARMUP = 100
model = nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = LambdaLR(optimizer, lambda step: (step + 1) // WARMUP)
rule = torch.randn(16, 4)
for step in range(90):
    x = torch.randn(64, 16)
    y = (x @ rule).argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
