"""Go on from weights that DistributedDataParallel saved."""

import torch
from torch import nn

torch.manual_seed(0)
rule = torch.randn(12, 4)


def train(model, num_steps, first_step):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(first_step, first_step + num_steps):
        x = torch.randn(64, 12)
        y = (x @ rule).argmax(1)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if first_step and step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")


def build():
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 4))


saved = build()
train(saved, 300, 0)
checkpoint = {f"module.{name}": value for name, value in saved.state_dict().items()}
model = build()
model.load_state_dict(checkpoint, strict=False)
train(model, 60, 300)
