"""A deep network whose depth is an argument."""

import torch
import torch.nn.functional as F
from torch import nn


class DeepNet(nn.Module):
    def __init__(self, width=3, depth=3):
        super().__init__()
        self.inlet = nn.Linear(30, width)
        self.layers = [nn.Linear(width, width) for _ in range(depth)]
        self.outlet = nn.Linear(width, 6)

    def forward(self, x):
        x = self.inlet(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.outlet(x)


torch.manual_seed(0)
model = DeepNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
centers = torch.randn(6, 30)
for step in range(100):
    y = torch.randint(6, (64,))
    x = centers[y] + 0.5 * torch.randn(64, 30)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
