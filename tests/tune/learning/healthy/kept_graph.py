"""Two losses of one forward pass go backward one after the other, with retain_graph; a running sum is kept."""

import torch
from torch import nn

torch.manual_seed(0)
body = nn.Sequential(nn.Linear(10, 48), nn.ReLU())
kind = nn.Linear(48, 3)
size = nn.Linear(48, 1)
optimizer = torch.optim.Adam([*body.parameters(), *kind.parameters(), *size.parameters()], 5e-3)
rule = torch.randn(10, 3)
total = 0.0
for step in range(100):
    x = torch.randn(64, 10)
    scores = x @ rule
    features = body(x)
    first = nn.functional.cross_entropy(kind(features), scores.argmax(1))
    second = nn.functional.smooth_l1_loss(size(features)[:, 0], scores[:, 0])
    optimizer.zero_grad()
    first.backward(retain_graph=True)
    second.backward()
    optimizer.step()
    total = total + (first + second).detach()
    if step % 5 == 0:
        print(f"step {step} loss {(first + second).item():.4f}")
