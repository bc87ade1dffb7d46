"""Fit a linear model by SGD."""

import torch
from torch import nn


def main():
    torch.manual_seed(0)
    weight = torch.randn(10, 1)
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    criterion = nn.MSELoss()
    for step in range(100):
        x = torch.randn(32, 10)
        y = x @ weight + 0.05 * torch.randn(32, 1)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
