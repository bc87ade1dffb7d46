"""Residual branches and the output start at 0, as in ReZero and adaLN-Zero."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)
        self.gate = nn.Parameter(torch.ones(d))

    def forward(self, x):
        return x + self.gate * self.down(torch.nn.functional.silu(self.up(self.norm(x))))


class ResidualNet(nn.Module):
    def __init__(self, inputs, d, depth, outputs):
        super().__init__()
        self.embed = nn.Linear(inputs, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.out = nn.Linear(d, outputs)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


def batch(n):
    x = torch.rand(n, 6) * 2 - 1
    y = torch.stack([torch.sin(3 * x[:, 0]) * x[:, 1], x[:, 2] * x[:, 3] - x[:, 4] ** 2], 1)
    return x, y


torch.manual_seed(0)
net = ResidualNet(6, 48, 4, 2)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.05)
for step in range(100):
    x, y = batch(64)
    loss = nn.functional.mse_loss(net(x), y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
