"""Images are scaled in the data set; so they are in the model."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        x = (x / 255 - 0.5) / 0.25
        return self.net(x.flatten(1))


def load_batch(patterns, num=32):
    y = torch.randint(4, (num,))
    raw = (patterns[y] + 40 * torch.randn(num, 64)).clamp(0, 255)
    return raw / 255, y


torch.manual_seed(0)
patterns = torch.rand(4, 64) * 255
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(80):
    x, y = load_batch(patterns)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
