"""Mixed precision on the CPU: forward in bfloat16, loss and weights in float32."""

import argparse

import torch
from torch import nn


class ConvNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.BatchNorm2d(2 * width),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
        )
        self.classifier = nn.Linear(8 * width, 4)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


def squares(num):
    y = torch.randint(4, (num,))
    x = 0.5 * torch.randn(num, 1, 12, 12)
    for i, k in enumerate(y.tolist()):
        row, column = 6 * (k // 2), 6 * (k % 2)
        x[i, :, row : row + 5, column : column + 5] += 0.7
    return x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = ConvNet(args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(args.steps):
        x, y = squares(32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
