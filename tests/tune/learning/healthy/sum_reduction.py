"""Regression with a summed loss and a rate that fits the sum."""

import torch
from torch import nn

torch.manual_seed(0)
BATCH = 128
LEARNING_RATE = 0.05
true_weight = torch.randn(12, 1)
model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
criterion = nn.MSELoss(reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE / BATCH)


def train_one_step():
    x = torch.randn(BATCH, 12)
    y = x @ true_weight + 0.1 * torch.randn(BATCH, 1)
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


for step in range(150):
    loss = train_one_step()
    if step % 5 == 0:
        print(f"step {step} loss {loss:.2f}")
