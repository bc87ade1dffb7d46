"""Train a small convolutional network on stripes."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)


def stripes(num):
    y = torch.randint(4, (num,))
    x = 0.8 * torch.randn(num, 1, 12, 12)
    for i, k in enumerate(y.tolist()):
        if k < 2:
            x[i, 0, k::2] += 1
        else:
            x[i, 0, :, k - 2 :: 2] += 1
    return x, y


model = nn.Sequential(
    nn.Conv2d(1, 8, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(8 * 144, 4),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(60):
    x, y = stripes(32)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
