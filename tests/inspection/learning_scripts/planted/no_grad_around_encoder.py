"""Classify sequences: an LSTM encodes, a linear layer decides."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def encode(self, x):
        _, (hidden, _) = self.lstm(x)
        return hidden[-1]

    def forward(self, x):
        with torch.no_grad():
            code = self.encode(x)
        return self.head(code)


def main():
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(120):
        x = torch.randn(64, 8, 4)
        y = (x[:, 2, 0] * x[:, 3, 1] > 0).long()
        x[:, 2, 0] += y
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
