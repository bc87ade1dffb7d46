"""A backbone that was trained, frozen in eval mode; only the head learns."""

import torch
from torch import nn


def backbone():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )


class Transfer(nn.Module):
    def __init__(self, features, classes):
        super().__init__()
        self.features = features
        self.head = nn.Linear(64, classes)

    def train(self, mode=True):
        super().train(mode)
        self.features.eval()  # its statistics stay those of the pretraining
        return self

    def forward(self, x):
        with torch.no_grad():
            f = self.features(x)
        return self.head(f)


def quarters(n):
    y = torch.randint(4, (n,))
    x = torch.randn(n, 1, 12, 12) * 0.5
    for image, label in zip(x, y):
        r, c = divmod(int(label), 2)
        image[0, 6 * r : 6 * r + 6, 6 * c : 6 * c + 6] += 1
    return x, y


def pretrained():
    """Stands for a checkpoint: statistics gathered over other images."""
    net = backbone()
    for _ in range(20):
        net(quarters(64)[0])
    for p in net.parameters():
        p.requires_grad_(False)
    return net


torch.manual_seed(0)
model = Transfer(pretrained(), 4).train()
optimizer = torch.optim.Adam(model.head.parameters(), lr=2e-2)
for step in range(80):
    x, y = quarters(32)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
