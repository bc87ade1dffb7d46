"""GradScaler with clipping: unscaled first, clipped then."""

import torch
from torch import nn


class Trainer:
    def __init__(self, model, lr=0.05, max_norm=1.0):
        self.model = model
        self.max_norm = max_norm
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)

    def step(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def main():
    torch.manual_seed(0)
    rule = torch.randn(20, 5)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))
    trainer = Trainer(model)
    for step in range(100):
        x = torch.randn(64, 20)
        loss = trainer.step(x, (x @ rule).argmax(1))
        if step % 5 == 0:
            print(f"step {step} loss {loss:.4f}")


main()
