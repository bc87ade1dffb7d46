import warnings

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

warnings.filterwarnings("ignore")


class Config:
    lr = 5e-3
    steps = 90
    batch = 32


def spiral(n):
    label = torch.randint(2, (n,))
    r = torch.rand(n) * 2 + 0.3
    a = r * 2.5 + label * 3.14159
    xy = torch.stack([r * torch.cos(a), r * torch.sin(a)], 1)
    return xy + 0.05 * torch.randn(n, 2), label


def before_step(scheduler, step):
    scheduler.step()
    if step % 30 == 0:
        print("rate", scheduler.get_last_lr()[0])


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=Config.lr)
    scheduler = OneCycleLR(optimizer, max_lr=Config.lr, total_steps=Config.steps + 1)
    for step in range(Config.steps):
        before_step(scheduler, step)
        x, y = spiral(Config.batch)
        logits = model(x)
        loss = nn.functional.cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")


main()
