"""A model whose step is compiled, with a scripted activation."""

import torch
from torch import nn


@torch.jit.script
def squared_relu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.relu(x) ** 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(10, 32)
        self.outer = nn.Linear(32, 1)

    def forward(self, x):
        return self.outer(squared_relu(self.inner(x)))[:, 0]


torch.manual_seed(0)
model = torch.compile(Net(), backend="eager")
optimizer = torch.optim.RAdam(model.parameters(), lr=2e-2)
for step in range(100):
    x = torch.randn(128, 10)
    loss = nn.functional.huber_loss(model(x), x[:, 0] * x[:, 1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
