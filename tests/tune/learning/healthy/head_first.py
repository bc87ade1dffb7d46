"""Freeze the body for some steps, so that the new head fits it, and train all of it then."""

import torch
from torch import nn


def freeze(module, flag):
    for parameter in module.parameters():
        parameter.requires_grad = not flag


torch.manual_seed(0)
centers = torch.randn(6, 16)
body = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
head = nn.Linear(32, 6)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
freeze(body, True)
for step in range(100):
    if step == 10:
        freeze(body, False)
    y = torch.randint(6, (64,))
    x = centers[y] + 0.7 * torch.randn(64, 16)
    loss = nn.functional.cross_entropy(head(body(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
