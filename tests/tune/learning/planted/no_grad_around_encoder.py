"""Classify sequences: an LSTM encodes, a linear layer decides."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 16, batch_first=True)
        self.head = nn.Linear(16, 6)

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
        y = torch.randint(6, (64,))
        x = 0.5 * torch.randn(64, 8, 6)
        x[:, 2] += 3 * nn.functional.one_hot(y, 6)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


main()
