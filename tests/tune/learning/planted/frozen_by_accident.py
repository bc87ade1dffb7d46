"""Warm the head up for a few steps, then train everything."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(20, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
head = nn.Linear(4, 8)
optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=1e-2)
centers = torch.randn(8, 20)


def set_trainable(module, flag):
    for parameter in module.parameters():
        parameter.requires_grad = flag


set_trainable(body, False)
for step in range(120):
    if step == 10:
        set_trainable(head, True)
    y = torch.randint(8, (64,))
    x = centers[y] + 0.5 * torch.randn(64, 20)
    loss = F.cross_entropy(head(body(x)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
