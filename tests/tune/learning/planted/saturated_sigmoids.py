"""Own initialization of sigmoid layers."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(12, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 6)
)
for layer in model[:3]:
    if isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=50.0)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
centers = torch.randn(6, 12)
for step in range(150):
    y = torch.randint(6, (64,))
    x = centers[y] + 0.3 * torch.randn(64, 12)
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
