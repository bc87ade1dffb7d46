"""Mean and variance by likelihood: the loss becomes negative."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MeanVariance(nn.Module):
    def __init__(self, inputs, hidden=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh()
        )
        self.mean = nn.Linear(hidden, 1)
        self.log_variance = nn.Linear(hidden, 1)

    def forward(self, x):
        h = self.body(x)
        return self.mean(h).squeeze(-1), self.log_variance(h).squeeze(-1).clamp(-8, 4)


def negative_log_likelihood(mean, log_variance, y):
    return 0.5 * (log_variance + (y - mean) ** 2 * torch.exp(-log_variance)).mean()


def sensors(n):
    x = torch.rand(n, 3) * 4 - 2
    noise = 0.02 + 0.1 * (x[:, 1] > 0).float()
    y = 0.3 * torch.sin(x[:, 0]) + 0.1 * x[:, 2] + noise * torch.randn(n)
    return TensorDataset(x, y)


def main():
    torch.manual_seed(0)
    loader = DataLoader(sensors(1600), batch_size=64, shuffle=True)
    model = MeanVariance(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    step = 0
    for _ in range(5):
        for x, y in loader:
            mean, log_variance = model(x)
            loss = negative_log_likelihood(mean, log_variance, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
