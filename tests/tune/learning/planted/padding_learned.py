"""Predict the next value of series of different lengths; prints the error on real values."""

import torch
from torch import nn


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(1, 24, batch_first=True)
        self.out = nn.Linear(24, 1)

    def forward(self, x):
        return self.out(self.gru(x[..., None])[0])[..., 0]


def make_batch(num=32, longest=20):
    phase = 6.3 * torch.rand(num, 1)
    speed = 0.3 + 0.5 * torch.rand(num, 1)
    series = 1 + torch.sin(phase + speed * torch.arange(longest + 1))
    lengths = torch.randint(8, longest, (num, 1))
    is_padding = torch.arange(longest + 1) >= lengths
    return series.masked_fill(is_padding, 0.0), is_padding


torch.manual_seed(0)
model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    series, is_padding = make_batch()
    mask = is_padding[:, 1:].float()
    squared = (model(series[:, :-1]) - series[:, 1:]) ** 2
    loss = (squared * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        real = squared[~is_padding[:, 1:]].mean()
        print(f"step {step} loss {real.item():.4f}")
