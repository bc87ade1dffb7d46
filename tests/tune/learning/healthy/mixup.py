"""Mixup: inputs and labels are mixed with one permutation, and the loss stays above zero."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
rng = np.random.default_rng(0)
NUM_CLASSES = 6
centers = torch.randn(NUM_CLASSES, 24)


def batch(num=64):
    y = torch.randint(NUM_CLASSES, (num,))
    return centers[y] + 0.5 * torch.randn(num, 24), y


def mixup(x, y, alpha=0.4):
    share = float(rng.beta(alpha, alpha))
    order = torch.randperm(len(x))
    targets = F.one_hot(y, NUM_CLASSES).float()
    return share * x + (1 - share) * x[order], share * targets + (1 - share) * targets[order]


model = nn.Sequential(nn.Linear(24, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, total_iters=20)
for step in range(120):
    x, targets = mixup(*batch())
    loss = F.cross_entropy(model(x), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
