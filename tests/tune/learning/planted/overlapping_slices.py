"""Regression with a validation part; prints the validation loss."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def load(num=1200):
    x = torch.randn(num, 40)
    return x, torch.sin(x[:, :3].sum(1)) + 0.3 * torch.randn(num)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-train", type=int, default=1100)
    parser.add_argument("--num-val", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=12)
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y = load()
    train = TensorDataset(x[: args.num_train], y[: args.num_train])
    val = TensorDataset(x[-args.num_val :], y[-args.num_val :])
    loader = DataLoader(train, batch_size=64, shuffle=True)
    val_loader = DataLoader(val, batch_size=100)
    model = nn.Sequential(nn.Linear(40, 128), nn.Tanh(), nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()
    step = 0
    for _ in range(args.epochs):
        for inputs, targets in loader:
            loss = criterion(model(inputs).squeeze(1), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                with torch.no_grad():
                    losses = [criterion(model(a).squeeze(1), b) for a, b in val_loader]
                print(f"step {step} loss {torch.stack(losses).mean().item():.4f}")
            step += 1


main()
