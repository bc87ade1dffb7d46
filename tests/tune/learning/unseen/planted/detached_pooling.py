import numpy as np
import torch
from torch import nn


class SegmentPool(nn.Module):
    """Means over three segments of unequal length."""

    def __init__(self, edges):
        super().__init__()
        self.edges = edges

    def forward(self, sequence):
        values = sequence.detach().numpy()
        parts = np.split(values, self.edges, axis=2)
        pooled = np.concatenate([p.mean(axis=2) for p in parts], axis=1)
        return torch.from_numpy(pooled)


class EventNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(2, 12, 5, padding=2)
        self.conv2 = nn.Conv1d(12, 12, 5, padding=2)
        self.pool = SegmentPool([10, 25])
        self.fc = nn.Linear(36, 3)

    def forward(self, x):
        x = torch.relu(self.conv1(x))
        x = torch.relu(self.conv2(x))
        return self.fc(self.pool(x))


def events(n):
    x = torch.randn(n, 2, 40) * 0.5
    y = torch.randint(3, (n,))
    starts = torch.tensor([2, 14, 28])
    for row, label in zip(x, y):
        s = starts[label]
        row[0, s : s + 6] += torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    return x, y


def main():
    torch.manual_seed(0)
    x, y = events(600)
    model = EventNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(90):
        i = torch.randperm(600)[:32]
        loss = nn.functional.cross_entropy(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
