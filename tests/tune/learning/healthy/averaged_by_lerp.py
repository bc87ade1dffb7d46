"""A moving average with a copy of the weights, updated by lerp_; the average is validated."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
rule = torch.randn(12, 4)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(150):
    x = torch.randn(64, 12)
    loss = nn.functional.cross_entropy(model(x), (x @ rule).argmax(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter, 0.1)
        val_loss = nn.functional.cross_entropy(average(x), (x @ rule).argmax(1))
    if step % 5 == 0:
        print(f"step {step} loss {val_loss.item():.4f}")
