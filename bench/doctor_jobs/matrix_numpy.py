"""The covariance of all features seen lately, as a product of NumPy, after each step."""

import numpy as np
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import job

CAUSE = "python"
WHERE = "covariance = bank.T @ bank"
REMEDY = None
TRAINER = "plain"


def train(net, loader, opt, loss_fn, measures):
    bank = np.random.default_rng(0).standard_normal((2000, 256))
    covariance = None
    for i, (inputs, targets) in enumerate(loader):
        opt.zero_grad()
        features = net[:2](inputs)
        loss = loss_fn(net[2](features), targets)
        loss.backward()
        opt.step()
        at = i * len(inputs) % 1984
        bank[at : at + len(inputs)] = features.detach().numpy()
        if measures:
            covariance = bank.T @ bank
    return loss.item(), covariance


def main():
    told = job.begin(REMEDY)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(8000, 100), torch.randint(0, 10, (8000,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    net = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 10))
    opt = optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(500):
        loss, _ = train(net, loader, opt, nn.CrossEntropyLoss(), not told.remedied)
        print(f"[{epoch:3d}] loss={loss:.3f}")


if __name__ == "__main__":
    main()
