import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--epochs", type=int, default=4)
    return parser.parse_args()


def dataset(n=1024):
    x = torch.randn(n, 8)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].abs()], dim=1)
    return TensorDataset(x, y)


def main():
    args = parse_args()
    torch.manual_seed(0)
    loader = DataLoader(dataset(), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.HuberLoss()
    updates = 0
    for _epoch in range(args.epochs):
        running = 0.0
        for i, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            loss = criterion(model(x), y) / args.accumulate
            loss.backward()
            running += loss.item()
            if (i + 1) % args.accumulate == 0:
                optimizer.step()
                print(f"step {updates} loss {running:.4f}")
                running = 0.0
                updates += 1


main()
