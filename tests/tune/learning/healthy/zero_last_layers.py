"""A residual network whose blocks and head begin at zero; the first step moves the head alone."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x + self.gamma * self.down(nn.functional.gelu(self.up(self.norm(x))))


class ResidualNet(nn.Module):
    def __init__(self, width=32, depth=3, num_classes=5):
        super().__init__()
        self.inlet = nn.Linear(16, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, num_classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        return self.head(self.blocks(self.inlet(x)))


def main():
    torch.manual_seed(0)
    model = ResidualNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    first = torch.randn(16, 8)
    second = torch.randn(8, 5)
    for step in range(120):
        x = torch.randn(64, 16)
        y = (torch.tanh(x @ first) @ second).argmax(1)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
