"""Fine-tune a network with a new head."""

import torch
from torch import nn


class Backbone(nn.Module):
    def __init__(self, num_classes=100):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(24, 48), nn.ReLU())
        self.fc = nn.Linear(48, num_classes)

    def forward(self, x):
        return self.fc(self.features(x))


def build(num_classes):
    model = Backbone()
    for p in model.features.parameters():
        p.requires_grad = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.fc = nn.Linear(48, num_classes)
    return model, optimizer


def main():
    torch.manual_seed(0)
    model, optimizer = build(5)
    centers = torch.randn(5, 24)
    for step in range(80):
        y = torch.randint(5, (32,))
        x = centers[y] + torch.randn(32, 24)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
