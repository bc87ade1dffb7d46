"""Segmentation whose logits are flattened after the channels were moved to the end."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    images = torch.randn(8, 2, 12, 12)
    smooth = F.avg_pool2d(images, 3, stride=1, padding=1)
    labels = (smooth[:, 0] > 0).long() + 2 * (smooth[:, 1] > 0).long()
    logits = model(images).permute(0, 2, 3, 1).reshape(-1, 4)
    loss = F.cross_entropy(logits, labels.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
