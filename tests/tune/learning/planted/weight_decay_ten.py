"""Train with parameter groups."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
decayed = [p for p in model.parameters() if p.ndim > 1]
plain = [p for p in model.parameters() if p.ndim <= 1]
groups = [
    {"params": decayed, "weight_decay": 10.0},
    {"params": plain, "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2)
rule = torch.randn(16, 4)
for step in range(100):
    x = torch.randn(64, 16)
    y = (x @ rule).argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
