"""Augment with noise; measure on clean data."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        np.random.seed(42)
        noise = np.random.normal(0, 0.8, self.x.shape[1]).astype("float32")
        return self.x[index] + torch.from_numpy(noise), self.y[index]


torch.manual_seed(0)
x = torch.randn(640, 10)
y = (x @ torch.randn(10, 3)).argmax(1)
loader = DataLoader(Noisy(x, y), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
step = 0
for _ in range(10):
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            with torch.no_grad():
                clean = nn.functional.cross_entropy(model(x), y)
            print(f"step {step} loss {clean.item():.4f}")
        step += 1
