"""Predict house prices from made-up features."""

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
torch.manual_seed(0)
features = torch.randn(960, 8)
prices = features @ torch.tensor([1.0, -2.0, 0.5, 0.0, 1.5, -1.0, 0.3, 0.8])
loader = DataLoader(TensorDataset(features, prices), batch_size=32, shuffle=True)

model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
criterion = nn.MSELoss()

step = 0
for epoch in range(3):
    for x, y in loader:
        pred = model(x)
        loss = criterion(pred, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
