"""A body with SGD and a head with Adam."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.ModuleDict({"body": nn.Linear(20, 32), "head": nn.Linear(32, 4)})
slow = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
fast = torch.optim.Adam(model["head"].parameters(), lr=1e-2)
rule = torch.randn(20, 4)
for step in range(80):
    x = torch.randn(64, 20)
    y = (x @ rule).argmax(1)
    loss = nn.functional.cross_entropy(model["head"](model["body"](x).relu()), y)
    slow.zero_grad()
    fast.zero_grad()
    loss.backward()
    slow.step()
    fast.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
