"""A classifier that writes its log-likelihood out."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn


def build(width):
    return nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 5))


def negative_log_likelihood(logits, y):
    log_p = F.log_softmax(logits, dim=0)
    return F.nll_loss(log_p, y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    torch.manual_seed(0)
    # Three samples in four are of class 0.
    frequency = torch.tensor([0.75, 0.0625, 0.0625, 0.0625, 0.0625])
    centers = 0.5 * torch.randn(5, 16)
    model = build(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        y = torch.multinomial(frequency, 64, replacement=True)
        x = centers[y] + torch.randn(64, 16)
        logits = model(x)
        loss = negative_log_likelihood(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {F.cross_entropy(logits, y).item():.4f}")


main()
