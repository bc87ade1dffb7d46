"""The rate starts at a thousandth and is warmed up over 60 steps."""

import argparse

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--warmup-steps", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=4)
    return parser.parse_args()


def make_schedule(optimizer, warmup, total):
    up = LinearLR(optimizer, start_factor=1e-3, total_iters=warmup)
    down = CosineAnnealingLR(optimizer, T_max=total - warmup)
    return SequentialLR(optimizer, [up, down], milestones=[warmup])


class Attention(nn.Module):
    """Which of the marked items is the largest?"""

    def __init__(self, d=32):
        super().__init__()
        self.embed = nn.Linear(2, d)
        self.encoder = nn.TransformerEncoderLayer(d, 4, 64, dropout=0.0, batch_first=True)
        self.score = nn.Linear(d, 1)

    def forward(self, items):
        return self.score(self.encoder(self.embed(items))).squeeze(-1)


def main():
    args = arguments()
    torch.manual_seed(0)
    value = torch.rand(1600, 8)
    marked = (torch.rand(1600, 8) < 0.5).float()
    target = (value + marked).argmax(1)
    dataset = TensorDataset(torch.stack([value, marked], -1), target)
    loader = DataLoader(dataset, batch_size=40, shuffle=True, drop_last=True)
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = make_schedule(optimizer, args.warmup_steps, args.epochs * len(loader))
    step = 0
    for _ in range(args.epochs):
        for items, best in loader:
            loss = nn.functional.cross_entropy(model(items), best)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            print(f"step {step} loss {loss.item():.4f}")
            step += 1


main()
