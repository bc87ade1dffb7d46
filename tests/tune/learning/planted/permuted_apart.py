"""Shuffle by hand at each epoch."""

import torch
from torch import nn

torch.manual_seed(0)
labels = torch.randint(6, (640,))
inputs = torch.randn(6, 18)[labels] + 0.4 * torch.randn(640, 18)
model = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.Linear(32, 6))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
step = 0
for _ in range(4):
    order = torch.randperm(640)
    x_epoch = inputs[order]
    y_epoch = labels[torch.randperm(640)]
    for start in range(0, 640, 32):
        x = x_epoch[start : start + 32]
        y = y_epoch[start : start + 32]
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
