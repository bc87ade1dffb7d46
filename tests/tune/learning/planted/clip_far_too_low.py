"""Train with clipped gradients."""

import torch
from torch import nn

torch.manual_seed(0)
config = {"lr": 0.1, "max_norm": 1e-4, "steps": 80}
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
rule = torch.randn(16, 4)
for step in range(config["steps"]):
    x = torch.randn(64, 16)
    y = (x @ rule).argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config["max_norm"])
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
