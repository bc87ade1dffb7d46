"""Two of five labels are wrong; smoothing and mixup keep the loss high."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def crowd(n, classes=6, wrong=0.4):
    centers = torch.randn(classes, 12) * 1.6
    truth = torch.randint(classes, (n,))
    x = centers[truth] + torch.randn(n, 12)
    label = torch.where(torch.rand(n) < wrong, torch.randint(classes, (n,)), truth)
    return x, label


def mixup(x, target, alpha=0.2):
    weight = torch.distributions.Beta(alpha, alpha).sample()
    order = torch.randperm(len(x))
    return weight * x + (1 - weight) * x[order], weight * target + (1 - weight) * target[order]


def main():
    torch.manual_seed(0)
    x, label = crowd(1600)
    loader = DataLoader(TensorDataset(x, label), batch_size=40, shuffle=True)
    model = nn.Sequential(
        nn.Linear(12, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 6)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    step = 0
    for _epoch in range(3):
        for bx, by in loader:
            bx, target = mixup(bx, F.one_hot(by, 6).float())
            loss = F.cross_entropy(model(bx), target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
