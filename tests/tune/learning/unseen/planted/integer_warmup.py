import argparse

import torch
from torch import nn


def warmup_cosine(warmup, total):
    def factor(step):
        if step < warmup:
            return (step + 1) // warmup
        done = (step - warmup) / max(1, total - warmup)
        return 0.5 * (1 + torch.cos(torch.tensor(3.14159 * done)).item())

    return factor


def make_data(n):
    x = torch.rand(n, 4) * 2 - 1
    y = x[:, 0] ** 2 + x[:, 1] * x[:, 2] - 0.3 * x[:, 3]
    return x, y.unsqueeze(1)


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--warmup", type=int, default=500)
    p.add_argument("--total", type=int, default=5000)
    p.add_argument("--max-steps", type=int, default=100)
    return p.parse_args()


def main(args):
    torch.manual_seed(0)
    x, y = make_data(1000)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, warmup_cosine(args.warmup, args.total)
    )
    criterion = nn.MSELoss()
    for step in range(args.max_steps):
        i = torch.randint(1000, (50,))
        loss = criterion(model(x[i]), y[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"step {step} loss {loss.item():.4f}")


main(get_args())
