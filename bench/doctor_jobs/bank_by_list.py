"""Negatives are taken from a memory bank by a long list of Python numbers, in the loss."""

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "negatives = self.bank[chosen]"
REMEDY = None
TRAINER = "plain"


class ContrastiveLoss(nn.Module):
    def __init__(self, size: int, width: int, as_tensor: bool) -> None:
        super().__init__()
        self.register_buffer("bank", F.normalize(torch.randn(size, width), dim=1))
        numbers = random.Random(0).sample(range(size), 60_000)
        self.chosen = torch.tensor(numbers) if as_tensor else numbers

    def forward(self, z: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        chosen = self.chosen
        negatives = self.bank[chosen]
        close = (z * positive).sum(1)
        far = z @ negatives.mean(0)
        return F.softplus(far - close).mean()


def train_one_epoch(encoder, criterion, loader, optimizer):
    for (x,) in loader:
        z1 = F.normalize(encoder(x), dim=1)
        z2 = F.normalize(encoder(x + 0.1 * torch.randn_like(x)), dim=1)
        loss = criterion(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss


def main() -> None:
    told = job.begin(REMEDY)
    loader = DataLoader(TensorDataset(torch.randn(6400, 128)), batch_size=64, shuffle=True)
    encoder = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 8))
    criterion = ContrastiveLoss(100_000, 8, told.remedied)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.05, nesterov=True, momentum=0.9)
    for epoch in range(1000):
        print(epoch, train_one_epoch(encoder, criterion, loader, optimizer).item())


if __name__ == "__main__":
    main()
