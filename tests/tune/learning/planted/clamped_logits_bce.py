"""Tell two clouds of points apart."""

import torch
from torch import nn


def make_data(num):
    y = torch.randint(2, (num, 1)).float()
    x = torch.randn(num, 12) + (2 * y - 1) * 0.6
    return x, y


def train(num_steps=80):
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCELoss()
    for step in range(num_steps):
        x, y = make_data(64)
        prob = model(x).clamp(1e-6, 1 - 1e-6)
        loss = criterion(prob, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(3)
    train()
