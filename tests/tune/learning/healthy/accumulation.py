"""Gradient accumulation: each update averages four small batches."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=4)
    return parser.parse_args()


def main():
    args = parse()
    torch.manual_seed(0)
    x = torch.randn(1280, 20)
    y = (x @ torch.randn(20, 5)).argmax(1)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    update = 0
    for _ in range(args.epochs):
        total = 0.0
        for i, (inputs, targets) in enumerate(loader, 1):
            loss = criterion(model(inputs), targets) / args.accumulate
            loss.backward()
            total += loss.item()
            if i % args.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                if update % 5 == 0:
                    print(f"step {update} loss {total:.4f}")
                total = 0.0
                update += 1


main()
