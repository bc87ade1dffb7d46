"""An exponential moving average of the weights is what is validated."""

import copy

import torch
from torch import nn


class EMA:
    def __init__(self, model, decay):
        self.decay = decay
        self.num_updates = 0
        self.model = copy.deepcopy(model).eval()
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        for mean, value in zip(self.model.parameters(), model.parameters(), strict=True):
            mean.lerp_(value, 1 - decay)
        for mean, value in zip(self.model.buffers(), model.buffers(), strict=True):
            mean.copy_(value)


torch.manual_seed(0)
rule = torch.randn(16, 5)
x_val = torch.randn(512, 16)
y_val = (x_val @ rule).argmax(1)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
ema = EMA(model, decay=0.99)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

for step in range(150):
    x = torch.randn(32, 16)
    y = (x @ rule).argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update(model)
    if step % 10 == 0:
        with torch.no_grad():
            averaged = nn.functional.cross_entropy(ema.model(x_val), y_val)
        print(f"step {step} loss {averaged.item():.4f}")
