"""An encoder and a head, trained together."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
encoder = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, 3), nn.ReLU())
head = nn.Linear(3, 8)
optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-2)
centers = torch.randn(8, 40)


def batch(num=64):
    y = torch.randint(8, (num,))
    return centers[y] + 0.5 * torch.randn(num, 40), y


for step in range(100):
    x, y = batch()
    features = encoder(x)
    features = F.normalize(features.data, dim=1) * 4
    logits = head(features)
    loss = F.cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
