"""A model, its moving average, and a validation of the average."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
EMA_DECAY = 0.99999
net = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
ema_net = copy.deepcopy(net)
optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
rule = torch.randn(12, 4)
x_val = torch.randn(500, 12)
y_val = (x_val @ rule).argmax(1)


@torch.no_grad()
def update_ema():
    for mean, value in zip(ema_net.parameters(), net.parameters()):
        mean.mul_(EMA_DECAY).add_(value, alpha=1 - EMA_DECAY)


for step in range(120):
    x = torch.randn(64, 12)
    y = (x @ rule).argmax(1)
    loss = nn.functional.cross_entropy(net(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    update_ema()
    if step % 10 == 0:
        with torch.no_grad():
            val_loss = nn.functional.cross_entropy(ema_net(x_val), y_val)
        print(f"step {step} loss {val_loss.item():.4f}")
