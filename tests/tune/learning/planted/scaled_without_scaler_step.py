"""A trainer with mixed precision."""

import torch
from torch import nn


class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(self, x, y):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.optimizer.step()
        return loss.item()


def main():
    torch.manual_seed(0)
    centers = torch.randn(5, 20)
    trainer = Trainer(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 5)))
    for step in range(80):
        y = torch.randint(5, (64,))
        loss = trainer.step(centers[y] + torch.randn(64, 20), y)
        if step % 5 == 0:
            print(f"step {step} loss {loss:.4f}")


if __name__ == "__main__":
    main()
