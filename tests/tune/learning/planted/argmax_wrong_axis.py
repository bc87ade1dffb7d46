"""Classify with one-hot labels."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
NUM_CLASSES = 16
centers = torch.randn(NUM_CLASSES, 24)
model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, NUM_CLASSES))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def one_hot_batch():
    label = torch.randint(NUM_CLASSES, (16,))
    x = centers[label] + 0.5 * torch.randn(16, 24)
    return x, F.one_hot(label, NUM_CLASSES)


for step in range(120):
    x, target = one_hot_batch()
    y = target.argmax(dim=0)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
