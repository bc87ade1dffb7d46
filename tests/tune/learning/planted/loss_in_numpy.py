"""A loss of one's own, written with numpy."""

import numpy as np
import torch
from torch import nn


def huber(pred, target, delta=1.0):
    error = np.abs(pred - target)
    return np.where(error < delta, 0.5 * error**2, delta * (error - 0.5 * delta)).mean()


def main():
    torch.manual_seed(0)
    weight = torch.randn(10, 1)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(80):
        x = torch.randn(64, 10)
        y = x @ weight
        pred = model(x)
        value = huber(pred.detach().numpy(), y.numpy())
        loss = torch.tensor(value, requires_grad=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
