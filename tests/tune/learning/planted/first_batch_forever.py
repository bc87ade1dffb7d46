"""Train for a number of steps; measure on the whole data."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x_all = torch.randn(640, 30)
y_all = (x_all @ torch.randn(30, 4)).argmax(1)
loader = DataLoader(TensorDataset(x_all, y_all), batch_size=16)
model = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(100):
    x, y = next(iter(loader))
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        with torch.no_grad():
            whole = nn.functional.cross_entropy(model(x_all), y_all)
        print(f"step {step} loss {whole.item():.4f}")
