"""InfoNCE over two views; the loss starts near the logarithm of the batch size."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def info_nce(first, second, temperature=0.5):
    logits = first @ second.T / temperature
    target = torch.arange(len(first))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def view(x):
    mask = (torch.rand_like(x) > 0.4).float()
    return x * mask + 1.0 * torch.randn_like(x)


def main():
    torch.manual_seed(0)
    data = torch.randn(1024, 6) @ torch.randn(6, 40)
    encoder = Encoder()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=3e-3, weight_decay=1e-4)
    for step in range(100):
        x = data[torch.randperm(1024)[:128]]
        loss = info_nce(encoder(view(x)), encoder(view(x)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
