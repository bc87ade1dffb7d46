"""A trainer with a step function."""

import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(10, 40), nn.GELU(), nn.Linear(40, 3))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, x, y):
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.zero_grad(set_to_none=False)
        self.optimizer.step()
        return loss.item()


def main():
    torch.manual_seed(2)
    rule = torch.randn(10, 3)
    trainer = Trainer()
    for step in range(80):
        x = torch.randn(64, 10)
        y = (x @ rule).argmax(dim=1)
        loss = trainer.training_step(x, y)
        if step % 5 == 0:
            print(f"step {step} loss {loss:.4f}")


main()
