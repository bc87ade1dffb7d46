import argparse

import torch
from torch import nn


class SineRegressor(nn.Module):
    """An LSTM that continues a mixture of sines."""

    def __init__(self, hidden):
        super().__init__()
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, series):
        states, _ = self.rnn(series)
        return self.out(states)


def sample(n, length):
    t = torch.arange(length + 1) * 0.2
    phase = torch.rand(n, 1) * 6.28
    speed = 0.5 + torch.rand(n, 1)
    wave = torch.sin(speed * t + phase)
    return wave[:, :-1, None], wave[:, 1:, None]


def train_one_step(model, optimizer, batch, args):
    series, target = batch
    optimizer.zero_grad()
    loss = nn.functional.smooth_l1_loss(model(series), target)
    loss.backward()
    optimizer.step()
    if args.clip > 0:
        nn.utils.clip_grad_value_(model.parameters(), args.clip)
    return loss


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--clip", type=float, default=0.05)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=80)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    torch.manual_seed(0)
    model = SineRegressor(args.hidden)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for step in range(args.steps):
        loss = train_one_step(model, optimizer, sample(16, 30), args)
        print(f"step {step} loss {loss.item():.5f}")
