"""Validate the moving average of the weights."""

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.shadow = dict(model.named_parameters())

    @torch.no_grad()
    def update(self, model):
        for name, parameter in model.named_parameters():
            self.shadow[name].lerp_(parameter, 1 - self.decay)


def main():
    torch.manual_seed(0)
    rule = torch.randn(16, 5)
    x_val = torch.randn(1000, 16)
    y_val = (x_val @ rule).argmax(1)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))
    ema = EMA(model, decay=0.95)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(200):
        x = torch.randn(8, 16)
        y = (x @ rule + torch.randn(8, 5)).argmax(1)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        if step % 10 == 0:
            with torch.no_grad():
                logits = torch.func.functional_call(model, ema.shadow, (x_val,))
            print(f"step {step} loss {nn.functional.cross_entropy(logits, y_val).item():.4f}")


main()
