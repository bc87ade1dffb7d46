"""Train a new head on a backbone that stays frozen, as a linear probe does."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centers = torch.randn(12, 32)


def batch(classes, num=64):
    y = torch.randint(classes, (num,))
    return centers[y] + 0.6 * torch.randn(num, 32), y


class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        )
        self.head = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrain(model, steps=80):
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x, y = batch(12)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


model = Net(12)
pretrain(model)

# A new task: six classes, and only the head may move.
model.head = nn.Linear(64, 6)
for parameter in model.backbone.parameters():
    parameter.requires_grad_(False)
model.backbone.eval()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
for step in range(80):
    x, y = batch(6)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
