"""One sample in fifty is positive: the last bias starts at the logarithm of the odds."""

import math

import torch
from torch import nn

torch.manual_seed(0)
SHARE = 0.02


def batch(num=512):
    y = (torch.rand(num) < SHARE).float()
    x = torch.randn(num, 16)
    x[:, :4] += 2.0 * y[:, None]
    return x, y


model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
nn.init.constant_(model[-1].bias, math.log(SHARE / (1 - SHARE)))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.BCEWithLogitsLoss()

average = None
for step in range(200):
    x, y = batch()
    logits = model(x).squeeze(1)
    loss = criterion(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
    if step % 10 == 0:
        print(f"step {step} loss {average:.4f}")

with torch.no_grad():
    x, y = batch(20000)
    found = model(x).squeeze(1)[y == 1] > 0
print(f"share of the positives that are found: {found.float().mean():.2f}")
