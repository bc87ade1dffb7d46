"""Classify made-up digits with a small network."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
centers = torch.randn(10, 64)


def make_batch(size=64):
    y = torch.randint(10, (size,))
    return centers[y] + 0.7 * torch.randn(size, 64), y


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        return F.softmax(self.fc2(x), dim=1)


model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(80):
    x, y = make_batch()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
