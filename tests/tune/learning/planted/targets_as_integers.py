"""Predict a fraction between 0 and 1."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Fractions(Dataset):
    def __init__(self):
        self.x = torch.randn(640, 6)
        self.y = torch.sigmoid(self.x.sum(1))

    def __len__(self):
        return 640

    def __getitem__(self, index):
        return self.x[index], self.y[index].long()


torch.manual_seed(0)
data = Fractions()
model = nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
step = 0
for _ in range(4):
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        loss = nn.functional.mse_loss(model(x).sigmoid()[:, 0], y.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
        step += 1
