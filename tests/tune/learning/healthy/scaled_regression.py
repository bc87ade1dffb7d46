"""House prices in the hundred thousands: the targets are normalized, the error is told in money."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
area = 50 + 150 * torch.rand(1280)
rooms = torch.randint(1, 7, (1280,)).float()
age = 80 * torch.rand(1280)
price = 2500 * area + 15000 * rooms - 1200 * age + 90000 + 8000 * torch.randn(1280)
features = torch.stack([area, rooms, age], 1)

train = slice(0, 1024)
mean, std = features[train].mean(0), features[train].std(0)
price_mean, price_std = price[train].mean(), price[train].std()


def normalize(x):
    return (x - mean) / std


dataset = TensorDataset(normalize(features[train]), (price[train] - price_mean) / price_std)
loader = DataLoader(dataset, batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
criterion = nn.SmoothL1Loss()

step = 0
for _ in range(4):
    for x, y in loader:
        loss = criterion(model(x).squeeze(-1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1

with torch.no_grad():
    predicted = model(normalize(features[1024:])).squeeze(-1) * price_std + price_mean
print(f"mean error on new houses: {(predicted - price[1024:]).abs().mean().item():.0f}")
