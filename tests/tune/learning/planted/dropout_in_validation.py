"""Validate at each tenth step."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.6), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
rule = torch.randn(16, 4)
x_val = torch.randn(500, 16)
y_val = (x_val @ rule).argmax(1)


def validate():
    with torch.no_grad():
        logits = model(x_val)
    return nn.functional.cross_entropy(logits, y_val).item()


for step in range(120):
    x = torch.randn(64, 16)
    y = (x @ rule).argmax(1)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {validate():.4f}")
