"""Fit a curve with a loss that is written out."""

import argparse

import torch
from torch import nn


class Curve(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = nn.Linear(1, width)
        self.out = nn.Linear(width, 1)

    def forward(self, t):
        return self.out(torch.tanh(self.hidden(t)))


def mean_squared_error(pred, target):
    return ((pred - target) ** 2).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Curve(32)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        t = torch.rand(64) * 4 - 2
        target = torch.sin(2 * t)
        pred = model(t.unsqueeze(1))
        loss = mean_squared_error(pred, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
