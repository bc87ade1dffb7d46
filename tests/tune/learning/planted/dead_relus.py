"""Own initialization of a network."""

import torch
from torch import nn


def initialize(module):
    if isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight)
        nn.init.constant_(module.bias, -20.0)


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
model.apply(initialize)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
centers = torch.randn(4, 12)
for step in range(80):
    y = torch.randint(4, (64,))
    x = centers[y] + 0.5 * torch.randn(64, 12)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
